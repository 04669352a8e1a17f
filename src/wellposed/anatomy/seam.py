"""The seam: a block whose residual adds are calls of small child modules.

Every family but ConvMixer adds its skips inside the block's own ``forward``, out of a hook's reach. A
seamed block is of a subclass that differs in the adds alone::

    x = x + self.drop_path1(...)   ->   x = self.join_attention(x, self.drop_path1(...))

The subclass is made of upstream's own source, so nothing is copied that could fall behind it, and a
source that does not have the adds of its row is refused. It keeps upstream's class name, because
sharding policies go by it, and pickles as upstream's class plus its row.
"""

import ast
import copyreg
import functools
import inspect
import linecache
import textwrap
import types
from typing import Any

from torch import Tensor, nn

from wellposed.anatomy.marked import set_class, unmarked_class
from wellposed.anatomy.rows import Add, BlockRow, Role
from wellposed.errors import SeamError


class Join(nn.Module):
    """Adds a branch to its skip, or passes the branch alone once the skip is removed.

    A forward hook here sees the skip, the branch and their sum.
    """

    def __init__(self, role: Role) -> None:
        super().__init__()
        self.role: Role = role
        self.keep = True

    def __call__(self, skip: Tensor, branch: Tensor) -> Tensor:
        # The add is so short that nn.Module's own call would double its time; only hooks need that.
        if self._forward_hooks or self._forward_pre_hooks or self._backward_hooks or self._backward_pre_hooks:
            out: Tensor = super().__call__(skip, branch)
            return out
        return self.forward(skip, branch)

    def forward(self, skip: Tensor, branch: Tensor) -> Tensor:
        return skip + branch if self.keep else branch

    def extra_repr(self) -> str:
        return "skip kept" if self.keep else "skip removed"


def join_name(role: Role) -> str:
    return f"join_{role}"


def is_seamed(block: nn.Module) -> bool:
    return hasattr(type(block), "_seam_of")


def joins(block: nn.Module) -> list[Join]:
    """The joins of a seamed block; none of another."""
    return [child for child in block.children() if isinstance(child, Join)]


def open_seam(block: nn.Module, row: BlockRow) -> None:
    """Turn the adds of ``block`` into joins, in place. The block computes what it did, bit for bit."""
    if is_seamed(block):
        return
    if "forward" in vars(block):
        raise SeamError(
            f"this {type(block).__name__} has a forward of its own on the instance (dispatch hooks or a "
            "patch put it there), which would hide the edit; edit the model before that."
        )
    seamed = _seamed_class(unmarked_class(block), row)  # type: ignore[arg-type]
    for role in row.roles:
        if hasattr(block, join_name(role)):
            raise SeamError(
                f"{type(block).__name__} already has an attribute {join_name(role)!r}; rename it."
            )
        join = Join(role)
        block.add_module(join_name(role), join.train(block.training))
    set_class(block, seamed)


def close_seam(block: nn.Module) -> None:
    """Undo :func:`open_seam`."""
    if not is_seamed(block):
        return
    for join in joins(block):
        delattr(block, join_name(join.role))
    set_class(block, type(block)._seam_of)  # type: ignore[attr-defined]


def _new_seamed(upstream: type[nn.Module], row: BlockRow, *args: Any) -> nn.Module:
    cls: Any = _seamed_class(upstream, row)  # type: ignore[arg-type]
    block: nn.Module = cls.__new__(cls, *args)
    return block


def _reduce_ex(self: nn.Module, protocol: Any) -> Any:
    """Pickle and deepcopy by upstream's class and the row: the subclass has no importable name."""
    cls = type(self)
    reduced: Any = super(cls, self).__reduce_ex__(max(int(protocol), 2))
    make, args, *rest = reduced
    if make is not copyreg.__newobj__ or args[0] is not cls:  # type: ignore[attr-defined]
        raise SeamError(f"{cls.__name__} pickles itself in its own way; restore(model) before pickling.")
    return _new_seamed, (cls._seam_of, cls._seam_row, *args[1:]), *rest  # type: ignore[attr-defined]


@functools.cache
def _seamed_class(upstream: type[nn.Module], row: BlockRow) -> type[nn.Module]:
    members = {
        "forward": _seamed_forward(upstream, row),
        "__reduce_ex__": _reduce_ex,
        "__module__": __name__,
        "__qualname__": upstream.__qualname__,
        "__doc__": upstream.__doc__,
        "_seam_of": upstream,
        "_seam_row": row,
    }
    metaclass: Any = type(upstream)
    cls: type[nn.Module] = metaclass(upstream.__name__, (upstream,), members)
    return cls


def _seamed_forward(upstream: type[nn.Module], row: BlockRow) -> types.FunctionType:
    forward = upstream.forward
    where = f"{upstream.__module__}.{upstream.__qualname__}.forward"
    try:
        source = textwrap.dedent(inspect.getsource(forward))
    except (OSError, TypeError) as error:
        raise SeamError(
            f"the source of {where} is not available; define the class in a file or a notebook cell."
        ) from error
    try:
        definition = _JoinAdds(row.adds, where, source).rewrite()
    except SeamError:
        if row.older_adds is None:
            raise
        definition = _JoinAdds(row.older_adds, where, source).rewrite()
    _substitute(definition, row, where)
    return _compile_like(forward, definition, where)


class _JoinAdds(ast.NodeTransformer):
    """Replaces ``skip + branch``, ``branch + skip`` and ``skip += branch`` by calls of joins."""

    def __init__(self, adds: tuple[Add, ...], where: str, source: str) -> None:
        self.adds, self.where, self.source = adds, where, source
        self.skips = {add.skip for add in adds}
        self.found = 0

    def rewrite(self) -> ast.FunctionDef:
        definition = ast.parse(self.source).body[0]
        if not isinstance(definition, ast.FunctionDef) or definition.decorator_list:
            raise SeamError(f"{self.where} is decorated or no plain function, its adds cannot be reached.")
        self.generic_visit(definition)
        if self.found != len(self.adds):
            raise self._mismatch(f"found {self.found}")
        return definition

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        operands = [node.left, node.right]
        if not isinstance(node.op, ast.Add) or not any(self._is_a_skip(side) for side in operands):
            return self.generic_visit(node)
        add = self._next()
        branch = [side for side in operands if not (isinstance(side, ast.Name) and side.id == add.skip)]
        if len(branch) != 1:
            raise self._mismatch(f"add number {self.found} is {ast.unparse(node)!r}")
        return self._call(add, branch[0])

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        if not isinstance(node.op, ast.Add) or not self._is_a_skip(node.target):
            return self.generic_visit(node)
        add = self._next()
        if not (isinstance(node.target, ast.Name) and node.target.id == add.skip):
            raise self._mismatch(f"add number {self.found} is {ast.unparse(node)!r}")
        return ast.Assign([node.target], self._call(add, node.value))

    def _is_a_skip(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id in self.skips

    def _next(self) -> Add:
        self.found += 1
        if self.found > len(self.adds):
            raise self._mismatch(f"found more than {len(self.adds)}")
        return self.adds[self.found - 1]

    def _call(self, add: Add, branch: ast.expr) -> ast.Call:
        join = ast.Attribute(ast.Name("self", ast.Load()), join_name(add.role), ast.Load())
        return ast.Call(join, [ast.Name(add.skip, ast.Load()), self.visit(branch)], [])

    def _mismatch(self, got: str) -> SeamError:
        expected = ", ".join(f"{add.skip} + <{add.role}>" for add in self.adds)
        return SeamError(
            f"expected the residual adds [{expected}] in {self.where}, {got}. The source differs from "
            "the one wellposed knows: install a version of the library named in "
            "wellposed.anatomy.families, or describe this one with wellposed.anatomy.teach.\n"
            f"{self.source}"
        )


def _substitute(definition: ast.FunctionDef, row: BlockRow, where: str) -> None:
    for old, new in row.substitutions:
        pattern = ast.dump(ast.parse(old, mode="eval").body)
        replacement = ast.parse(new, mode="eval").body
        count = 0
        for node in ast.walk(definition):
            for name, value in ast.iter_fields(node):
                if isinstance(value, ast.expr) and ast.dump(value) == pattern:
                    setattr(node, name, replacement)
                    count += 1
        if count != 1:
            raise SeamError(
                f"expected {old!r} once in {where}, found it {count} times; the source differs from the "
                "one wellposed knows, install a version named in wellposed.anatomy.families."
            )


def _compile_like(original: Any, definition: ast.FunctionDef, where: str) -> types.FunctionType:
    """Compile ``definition`` with the globals, defaults and closure of ``original``."""
    free = original.__code__.co_freevars
    # Closure variables (also the __class__ of super()) need an enclosing function that has them.
    body: list[ast.stmt] = [*(ast.parse(f"{name} = None").body[0] for name in free), definition]
    arguments = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    definition.args.defaults, definition.args.kw_defaults = _blank_defaults(definition.args)
    definition.returns = None
    for argument in ast.walk(definition.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    outer = ast.FunctionDef(name="_enclosing", args=arguments, body=body, decorator_list=[])
    module = ast.fix_missing_locations(ast.Module([outer], []))

    # Compiled from the text that tracebacks and debuggers will show.
    filename, text = f"<wellposed seam of {where}>", ast.unparse(module)
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    enclosing = _code_within(compile(text, filename, "exec"), "_enclosing")
    code = _code_within(enclosing, definition.name)
    cells = dict(zip(free, original.__closure__ or (), strict=True))
    closure = tuple(cells[name] for name in code.co_freevars)
    function = types.FunctionType(
        code, original.__globals__, original.__name__, original.__defaults__, closure
    )
    function.__kwdefaults__ = original.__kwdefaults__
    function.__annotations__ = dict(original.__annotations__)
    function.__qualname__, function.__doc__ = original.__qualname__, original.__doc__
    return function


def _blank_defaults(arguments: ast.arguments) -> tuple[list[ast.expr], list[ast.expr | None]]:
    none = ast.Constant(None)
    return (
        [none for _ in arguments.defaults],
        [None if default is None else none for default in arguments.kw_defaults],
    )


def _code_within(code: types.CodeType, name: str) -> types.CodeType:
    return next(
        const for const in code.co_consts if isinstance(const, types.CodeType) and const.co_name == name
    )
