"""The source of a method: its adds, and the same method with some of them turned into calls of joins.

::

    x = x + self.drop_path1(...)   ->   x = self.join_attention(x, self.drop_path1(...))

A method may be wrapped (a decorator, a library's checkpointing): the source is that of the function inside,
and the wrappers are put around the new function as they were around the old one.
"""

import ast
import functools
import hashlib
import inspect
import linecache
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from wellposed.errors import SeamError

_ADD_CALLS = ("add", "add_")


@dataclass(frozen=True)
class SourceAdd:
    """One add in a method's source: ``left + right``, ``left += right``, ``torch.add(left, right)``."""

    node: ast.BinOp | ast.AugAssign | ast.Call
    left: ast.expr
    right: ast.expr


class Method:
    """A method of a class, as it stands in the source.

    Raises :class:`~wellposed.errors.SeamError` where the source cannot be had or is not that of the function.
    """

    def __init__(self, cls: type, name: str) -> None:
        self.where = f"{cls.__module__}.{cls.__qualname__}.{name}"
        self.layers = _layers(inspect.getattr_static(cls, name), name, self.where)
        self.function = self.layers[-1]
        self.text, self.first_line, self.indent = _source(self.function, self.where)
        definition = ast.parse(self.text).body[0]
        if not isinstance(definition, ast.FunctionDef):
            raise SeamError(f"{self.where} is no plain function, its adds cannot be reached.")
        self.definition = definition

    @property
    def digest(self) -> str:
        """Of the source without comments and layout: another one is another version of the library."""
        return digest(self.definition)

    def adds(self) -> list[SourceAdd]:
        """All adds, in the order of the source."""
        return list(_adds(self.definition))

    def add_at(self, position: tuple[int | None, ...]) -> int | None:
        """The number of the add at a position that a running frame reports; None where there is none."""
        first, last, start, end = position
        if first is None or last is None or start is None or end is None:
            return None
        wanted = (
            first - self.first_line + 1,
            last - self.first_line + 1,
            start - self.indent,
            end - self.indent,
        )
        for number, add in enumerate(self.adds()):
            node = add.node
            if (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset) == wanted:
                return number
        return None

    def twins(self, joins: Mapping[int, bool], ran: set[int], owner: object) -> dict[int, tuple[int, bool]]:
        """The adds in arms of an ``if`` that were not taken, by their numbers.

        Each with the number of the join that it stands for, and whether the skip is on its left.

        Args:
            joins: numbers of the adds that are joins, and whether the skip is on their left.
            ran: numbers of all adds that ran.
            owner: whose method it is. An arm that uses what it does not have cannot be taken.

        Raises :class:`~wellposed.errors.SeamError` where another arm would go around the joins.
        """
        return _Arms(self, joins, ran, owner).twins()

    def with_joins(
        self, joins: Mapping[int, tuple[str, bool]], substitutions: tuple[tuple[str, str], ...] = ()
    ) -> Callable[..., Any]:
        """The method with adds turned into joins.

        Args:
            joins: for the number of an add, the name of its join and whether the skip is on its left.
            substitutions: (expression, replacement) pairs, each found once.
        """
        definition = self.parsed()
        calls = {
            id(add.node): (add, *joins[number])
            for number, add in enumerate(_adds(definition))
            if number in joins
        }
        owner = [*definition.args.posonlyargs, *definition.args.args][0].arg
        _JoinAdds(calls, owner).visit(definition)
        _substitute(definition, substitutions, self.where)
        return self.replaced(definition)

    def parsed(self) -> ast.FunctionDef:
        """The definition, to be changed."""
        definition = ast.parse(self.text).body[0]
        assert isinstance(definition, ast.FunctionDef)
        return definition

    def replaced(self, definition: ast.FunctionDef) -> Callable[..., Any]:
        """The method with another definition, in the wrappers that are around it."""
        definition.decorator_list = []
        return _rewrapped(self.layers, compiled_like(self.function, definition, self.where))


class _Arms:
    """The arms of a method's ``if`` statements: what was taken, and what else there is."""

    def __init__(self, method: Method, joins: Mapping[int, bool], ran: set[int], owner: object) -> None:
        self.method, self.ran, self.owner = method, ran, owner
        adds = method.adds()
        self.number = {id(add.node): number for number, add in enumerate(adds)}
        self.sides = {n: (ast.unparse(add.left), ast.unparse(add.right)) for n, add in enumerate(adds)}
        self.skip = {n: self.sides[n][0 if is_left else 1] for n, is_left in joins.items()}
        self.last_line = max((adds[n].node.lineno for n in joins), default=0)

    def twins(self) -> dict[int, tuple[int, bool]]:
        found: dict[int, tuple[int, bool]] = {}
        for node in ast.walk(self.method.definition):
            if isinstance(node, ast.If | ast.IfExp):
                body, other = _statements(node.body), _statements(node.orelse)
                taken = [arm for arm in (body, other) if self._within(arm, self.skip)]
                for arm in (body, other):
                    if arm not in taken:
                        found |= self._twins(node, taken[0] if taken else [], arm)
        return found

    def _twins(
        self, node: ast.If | ast.IfExp, taken: list[ast.AST], arm: list[ast.AST]
    ) -> dict[int, tuple[int, bool]]:
        joins = self._within(taken, self.skip)
        alike = [n for n in self._within(arm, self.sides) if n not in self.ran and self._is_on_a_stream(n)]
        if joins and len(alike) == len(joins):
            pairs = list(zip(alike, joins, strict=True))
            if all(self.skip[join] in self.sides[twin] for twin, join in pairs):
                return {twin: (join, self.sides[twin][0] == self.skip[join]) for twin, join in pairs}
        if (
            not _is_settled(node.test)
            and self._can_run(arm)
            and (alike or self._goes_around(node, joins, arm))
        ):
            raise SeamError(
                f"{self.method.where} goes another way where `{ast.unparse(node.test)}` turns out otherwise "
                "than for the example: adds there could not be seen. Give an example that goes that way"
            )
        return {}

    def _within(self, arm: list[ast.AST], numbers: Mapping[int, Any]) -> list[int]:
        inside = (self.number.get(id(node)) for statement in arm for node in ast.walk(statement))
        return sorted(number for number in inside if number is not None and number in numbers)

    def _can_run(self, arm: list[ast.AST]) -> bool:
        used = [node for statement in arm for node in ast.walk(statement) if isinstance(node, ast.Attribute)]
        own = [node.attr for node in used if isinstance(node.value, ast.Name) and node.value.id == "self"]
        return all(hasattr(self.owner, name) for name in own)

    def _is_on_a_stream(self, number: int) -> bool:
        return any(skip in self.sides[number] for skip in self.skip.values())

    def _goes_around(self, node: ast.If | ast.IfExp, joins: list[int], arm: list[ast.AST]) -> bool:
        inside = [inner for statement in arm for inner in ast.walk(statement)]
        returns = any(isinstance(inner, ast.Return) for inner in inside)
        if returns and node.lineno < self.last_line:
            return True
        stored = {n.id for n in inside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        return bool(joins) and not stored.isdisjoint(self.skip.values())


def _statements(arm: Any) -> list[ast.AST]:
    return list(arm) if isinstance(arm, list) else [arm]


def _is_settled(test: ast.expr) -> bool:
    """Whether a condition depends on nothing but how the module was built."""
    text = ast.unparse(test)
    if "is_scripting()" in text or "is_tracing()" in text:
        return True
    names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    return names <= {"self", "isinstance", "hasattr", "len"} and ".training" not in text


def digest(definition: ast.AST) -> str:
    """The same in every version of Python: newer ones know type parameters, and leave out what is empty."""
    options = {"show_empty": True} if sys.version_info >= (3, 13) else {}
    text = ast.dump(definition, **options).replace(", type_params=[]", "")
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def wrapped_functions(function: Any, name: str) -> Iterator[Any]:
    """A method and the functions that it wraps, the outermost first."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None) or _hidden(function, name)


def _hidden(function: Any, name: str) -> Any:
    """The method that a decorator without ``functools.wraps`` has in its closure."""
    if not isinstance(function, types.FunctionType) or function.__code__.co_name == name:
        return None
    inside = [f for f in _contents(function) if isinstance(f, types.FunctionType) and f.__name__ == name]
    return inside[0] if len(inside) == 1 else None


def _layers(method: Any, name: str, where: str) -> list[types.FunctionType]:
    layers = list(wrapped_functions(method, name))
    for outer, inner in zip(layers, [*layers[1:], None], strict=True):
        if not isinstance(outer, types.FunctionType):
            raise SeamError(
                f"{where} is a {type(outer).__name__}, no plain function: its adds cannot be reached."
            )
        if inner is not None and not any(inner is one for one in _contents(outer)):
            raise SeamError(
                f"{where} is wrapped by {outer.__qualname__}, which does not keep the function it wraps in "
                "its closure, so that no other can be put there; edit the model before it is wrapped."
            )
    return layers


def _contents(function: types.FunctionType) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _rewrapped(layers: list[types.FunctionType], function: types.FunctionType) -> types.FunctionType:
    """Put copies of the wrappers around another function."""
    inner = layers[-1]
    for wrapper in reversed(layers[:-1]):
        copy = types.FunctionType(
            wrapper.__code__,
            wrapper.__globals__,
            wrapper.__name__,
            wrapper.__defaults__,
            tuple(types.CellType() for _ in wrapper.__closure__ or ()),
        )
        for cell, old in zip(copy.__closure__ or (), wrapper.__closure__ or (), strict=True):
            if _is_filled(old):
                known = {id(inner): function, id(wrapper): copy}
                cell.cell_contents = known.get(id(old.cell_contents), old.cell_contents)
        copy.__kwdefaults__ = wrapper.__kwdefaults__
        copy.__dict__.update(wrapper.__dict__)
        if hasattr(wrapper, "__wrapped__"):
            functools.update_wrapper(copy, function)
        inner, function = wrapper, copy
    return function


def _source(function: types.FunctionType, where: str) -> tuple[str, int, int]:
    """The dedented source, the number of its first line and the columns that were taken off."""
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError) as error:
        raise SeamError(
            f"the source of {where} is not available; define the class in a file or a notebook cell."
        ) from error
    text = textwrap.dedent("".join(lines))
    return text, first, len(lines[0]) - len(text.splitlines(keepends=True)[0])


def _adds(definition: ast.FunctionDef) -> Iterator[SourceAdd]:
    """In the order of the source, an outer add before those inside it."""
    todo: list[ast.AST] = list(reversed(definition.body))
    while todo:
        node = todo.pop()
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            yield SourceAdd(node, node.left, node.right)
        elif (
            isinstance(node, ast.AugAssign)
            and isinstance(node.op, ast.Add)
            and isinstance(node.target, ast.Name)
        ):
            yield SourceAdd(node, ast.Name(node.target.id, ast.Load()), node.value)
        elif isinstance(node, ast.Call) and (operands := _operands(node)) is not None:
            yield SourceAdd(node, *operands)
        todo += reversed(list(ast.iter_child_nodes(node)))


def _operands(call: ast.Call) -> tuple[ast.expr, ast.expr] | None:
    """Of ``torch.add(a, b)``, ``a.add(b)`` and ``a.add_(b)``."""
    function = call.func
    if not isinstance(function, ast.Attribute) or function.attr not in _ADD_CALLS or call.keywords:
        return None
    if isinstance(function.value, ast.Name) and function.value.id == "torch":
        return (call.args[0], call.args[1]) if len(call.args) == 2 else None
    return (function.value, call.args[0]) if len(call.args) == 1 else None


class _JoinAdds(ast.NodeTransformer):
    def __init__(self, calls: dict[int, tuple[SourceAdd, str, bool]], owner: str) -> None:
        self.calls, self.owner = calls, owner

    def visit(self, node: ast.AST) -> ast.AST:
        found = self.calls.get(id(node))
        if found is None:
            return self.generic_visit(node)
        add, name, skip_is_left = found
        left, right = self.visit(add.left), self.visit(add.right)
        skip, branch = (left, right) if skip_is_left else (right, left)
        join = ast.Attribute(ast.Name(self.owner, ast.Load()), name, ast.Load())
        call = ast.Call(join, [skip, branch], [])  # type: ignore[list-item]
        return ast.Assign([node.target], call) if isinstance(node, ast.AugAssign) else call


def _substitute(definition: ast.FunctionDef, substitutions: tuple[tuple[str, str], ...], where: str) -> None:
    for old, new in substitutions:
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
                "one wellposed knows, install a version named in wellposed.anatomy.table."
            )


def compiled_like(
    original: types.FunctionType, definition: ast.FunctionDef, where: str
) -> types.FunctionType:
    """Compile ``definition`` with the globals, defaults and closure of ``original``."""
    free = original.__code__.co_freevars
    # Closure variables (also the __class__ of super()) need an enclosing function that has them.
    body: list[ast.stmt] = [*(ast.parse(f"{name} = None").body[0] for name in free), definition]
    arguments = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    none = ast.Constant(None)
    definition.args.defaults = [none for _ in definition.args.defaults]
    definition.args.kw_defaults = [
        None if default is None else none for default in definition.args.kw_defaults
    ]
    definition.returns = None
    for argument in ast.walk(definition.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    outer = ast.FunctionDef(name="_enclosing", args=arguments, body=body, decorator_list=[])
    module = ast.fix_missing_locations(ast.Module([outer], []))

    # Compiled from the text that tracebacks and debuggers will show.
    text = ast.unparse(module)
    filename = f"<wellposed seam of {where} {hashlib.sha256(text.encode()).hexdigest()[:8]}>"
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


def _code_within(code: types.CodeType, name: str) -> types.CodeType:
    return next(
        const for const in code.co_consts if isinstance(const, types.CodeType) and const.co_name == name
    )
