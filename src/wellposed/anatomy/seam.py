"""The seam: a block whose residual adds are calls of small child modules.

Most families add their skips inside a block's own methods, out of a hook's reach. A seamed module is of a
subclass that differs in the adds alone::

    x = x + self.drop_path1(...)   ->   x = self.join_attention(x, self.drop_path1(...))

The subclass is made of upstream's own source (see :mod:`wellposed.anatomy.source`), so nothing is copied
that could fall behind it, and a source that does not have the adds of its row is refused. It keeps
upstream's class name, because sharding policies go by it, and pickles as upstream's class plus its adds.
Where a block adds in its submodules (BERT's output layers), these are the seamed ones.
"""

import ast
import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from torch import Tensor, nn

from wellposed.anatomy.loops import close_loop, open_loop
from wellposed.anatomy.source import Method, SourceAdd
from wellposed.anatomy.subclass import set_class, subclass, unmarked_class
from wellposed.anatomy.table import Add, BlockRow, Role, Site
from wellposed.errors import SeamError
from wellposed.nn.operation import refuse_script

Cut = tuple[Add, ...]
"""The adds of one class, each with its site; a class and its cut make a seamed class."""


class Join(nn.Module):
    """Adds a branch to its skip, or passes the branch alone once the skip is removed.

    A forward hook here sees the skip, the branch and their sum.
    """

    allow_drop_path = False  # what the removal of the skip was called with

    def __init__(self, role: Role, name: str = "", *, skip_is_left: bool = True) -> None:
        super().__init__()
        self.skip_is_left = skip_is_left  # of two layouts in memory the sum has that of the left one
        self.role: Role = role
        self.name = name or role
        self.keep = True

    def __call__(self, skip: Tensor, branch: Tensor) -> Tensor:
        # The add is so short that nn.Module's own call would double its time; only hooks need that.
        if self._forward_hooks or self._forward_pre_hooks or self._backward_hooks or self._backward_pre_hooks:
            out: Tensor = super().__call__(skip, branch)
            return out
        return self.forward(skip, branch)

    def forward(self, skip: Tensor, branch: Tensor) -> Tensor:
        if not self.keep:
            return branch
        return skip + branch if self.skip_is_left else branch + skip

    def __prepare_scriptable__(self) -> NoReturn:
        refuse_script(self)

    def extra_repr(self) -> str:
        return "skip kept" if self.keep else "skip removed"


def join_name(name: str) -> str:
    return f"join_{name}"


def is_seamed(module: nn.Module) -> bool:
    return hasattr(type(module), "_seam_of")


def joins(module: nn.Module) -> list[Join]:
    """The joins that a seamed module has; none of another."""
    return [child for child in module.children() if isinstance(child, Join)]


def block_joins(block: nn.Module, row: BlockRow) -> list[Join]:
    """The joins of a block, those in its submodules too, in the order of its row; none of a closed one."""
    paths = {add.name: add.path for add in row.adds}
    found = [getattr(block.get_submodule(path), join_name(name), None) for name, path in paths.items()]
    return [join for join in found if isinstance(join, Join)]


def open_seam(block: nn.Module, row: BlockRow) -> None:
    """Turn the adds of ``block`` into joins, in place. The block computes what it did, bit for bit."""
    opened: list[nn.Module] = []
    open_loop(block)
    try:
        for path, cut in _cuts(block, row).items():
            module = block.get_submodule(path)
            if not is_seamed(module):
                _open(module, cut, row.substitutions)
                opened.append(module)
    except Exception:
        for module in opened:
            _close(module)
        close_loop(block)
        raise


def close_seam(block: nn.Module, row: BlockRow | None = None) -> None:
    """Undo :func:`open_seam`; without a row for the module alone, not for its submodules."""
    for path in {add.path for add in row.adds} if row else {""}:
        _close(block.get_submodule(path))
    close_loop(block)


@contextlib.contextmanager
def opened_seams(blocks: Iterable[tuple[nn.Module, BlockRow]]) -> Iterator[None]:
    """Inside, the seams of some blocks are open; those that were not are closed afterwards."""
    opened: list[tuple[nn.Module, BlockRow]] = []
    try:
        for block, row in blocks:
            if not is_open(block, row):
                open_seam(block, row)
                opened.append((block, row))
        yield
    finally:
        for block, row in opened:
            close_seam(block, row)


def is_open(block: nn.Module, row: BlockRow) -> bool:
    """Whether the seam of a block is open."""
    paths = {add.path for add in row.adds}
    return all(is_seamed(block.get_submodule(path)) for path in paths)


def _open(module: nn.Module, cut: Cut, substitutions: tuple[tuple[str, str], ...]) -> None:
    if "forward" in vars(module):
        raise SeamError(
            f"this {type(module).__name__} has a forward of its own on the instance (dispatch hooks or a "
            "patch put it there), which would hide the edit; edit the model before that."
        )
    seamed = _seamed_class(unmarked_class(module), cut, substitutions)  # type: ignore[arg-type]
    named = {add.name: add for add in reversed(cut)}  # the first of a name counts
    for name in named:
        if hasattr(module, join_name(name)):
            raise SeamError(
                f"{type(module).__name__} already has an attribute {join_name(name)!r}; rename it."
            )
    for name in dict.fromkeys(add.name for add in cut):
        site = named[name].site
        join = Join(named[name].role, name, skip_is_left=site is None or site.skip_is_left)
        module.add_module(join_name(name), join.train(module.training))
    set_class(module, seamed)


def _close(module: nn.Module) -> None:
    if not is_seamed(module):
        return
    for join in joins(module):
        delattr(module, join_name(join.name))
    set_class(module, type(module)._seam_of)  # type: ignore[attr-defined]


def _cuts(block: nn.Module, row: BlockRow) -> dict[str, Cut]:
    """The adds of a row by the path of the module that has them, each with its site."""
    cuts: dict[str, list[Add]] = {}
    adds = row.adds if row.adds[0].site else _sites(Method(unmarked_class(block), "forward"), row.adds)
    for add in adds:
        assert add.site is not None
        cuts.setdefault(add.site.path, []).append(add)
    return {path: tuple(cut) for path, cut in cuts.items()}


@functools.cache
def _seamed_class(
    upstream: type[nn.Module], cut: Cut, substitutions: tuple[tuple[str, str], ...]
) -> type[nn.Module]:
    members: dict[str, Any] = {"_seam_of": upstream}
    for name in dict.fromkeys(add.site.method for add in cut if add.site):
        sites = {add: add.site for add in cut if add.site and add.site.method == name}
        members[name] = _seamed_method(
            Method(upstream, name), sites, substitutions if name == "forward" else ()
        )
    return subclass(_seamed_class, upstream, cut, substitutions, members=members)


def _seamed_method(method: Method, sites: dict[Add, Site], substitutions: tuple[tuple[str, str], ...]) -> Any:
    if any(site.digest != method.digest for site in sites.values()):
        raise SeamError(
            f"the source of {method.where} is not the one in which its residual adds were found: the edited "
            "model is from another version of the library; install that version, or edit the model again."
        )
    joins = {site.number: (join_name(add.name), site.skip_is_left) for add, site in sites.items()}
    return method.with_joins(joins, substitutions)


def _sites(method: Method, adds: Cut) -> list[Add]:
    """Adds that are named by the variable of their skip, with their sites."""
    skips = {add.skip for add in adds}
    there = [
        (number, add)
        for number, add in enumerate(method.adds())
        if any(_is_a(side, skips) for side in (add.left, add.right))
    ]
    if len(there) > len(adds):
        raise _mismatch(method, adds, f"found more than {len(adds)}")
    if len(there) != len(adds):
        raise _mismatch(method, adds, f"found {len(there)}")
    return [
        Add(add.role, add.skip, _site(method, adds, add, number, source))
        for add, (number, source) in zip(adds, there, strict=True)
    ]


def _site(method: Method, adds: Cut, add: Add, number: int, source: SourceAdd) -> Site:
    sides = [_is_a(side, {add.skip}) for side in (source.left, source.right)]
    if sum(sides) != 1:
        raise _mismatch(method, adds, f"add number {number + 1} is {ast.unparse(source.node)!r}")
    return Site("", "forward", number, sides[0], method.digest)


def _is_a(node: ast.expr, names: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def _mismatch(method: Method, adds: Cut, got: str) -> SeamError:
    expected = ", ".join(f"{add.skip} + <{add.role}>" for add in adds)
    return SeamError(
        f"expected the residual adds [{expected}] in {method.where}, {got}. The source differs from "
        "the one wellposed knows: install a version of the library named in "
        "wellposed.anatomy.table, or describe this one with wellposed.anatomy.teach.\n"
        f"{method.text}"
    )
