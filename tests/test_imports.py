"""Which room imports which: the graph is drawn from the sources, and what an action loads is looked at.

Imports point one way: linalg <- nn <- anatomy <- surgery <- probes <- train <- studies. The report reads
records.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "wellposed"
ROOMS = ("linalg", "nn", "anatomy", "surgery", "probes", "report", "train", "integrations")

IN_ORDER = ("linalg", "nn", "anatomy", "surgery", "probes", "train")
ALLOWED = {room: set(IN_ORDER[:place]) for place, room in enumerate(IN_ORDER)} | {
    "report": set(),
    "integrations": {"probes"},
}
WHEN_ASKED = {("probes", "report")}
"""Inside a function: ``Diagnosis.to_html`` draws a page."""


def imports(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    """Each name that a file imports, and whether a function does so when it is called."""

    def walk(node: ast.AST, inside: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue  # nothing is imported
            if isinstance(child, ast.Import):
                yield from ((alias.name, inside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module and not child.level:
                yield from ((f"{child.module}.{alias.name}", inside) for alias in child.names)
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from walk(child, inside or is_function)

    yield from walk(tree, False)


def room_of(module: str) -> str:
    """``linalg`` of ``wellposed.linalg.dct``, ``root`` of ``wellposed.records``, the package of others."""
    package, _, rest = module.partition(".")
    first = rest.partition(".")[0]
    if package != "wellposed":
        return package
    return first if first in (*ROOMS, "commands") else "root"


def edges(folder: Path, package: str) -> set[tuple[str, str, str, bool]]:
    """(room, room that it imports, file, when asked) of all files of a folder."""
    found = set()
    for file in sorted(folder.rglob("*.py")):
        module = ".".join([package, *file.relative_to(folder).with_suffix("").parts])
        for name, is_late in imports(ast.parse(file.read_text(encoding="utf-8"))):
            room, other = room_of(module), room_of(name)
            if other != room:
                found.add((room, other, file.relative_to(ROOT).as_posix(), is_late))
    return found


def forbidden(graph: set[tuple[str, str, str, bool]]) -> list[str]:
    return [
        f"{file}: {room} imports {other}"
        for room, other, file, is_late in sorted(graph)
        if (room in ALLOWED and other in {*ROOMS, "commands", "studies", "benchmarks"} - ALLOWED[room])
        and not (is_late and (room, other) in WHEN_ASKED)
    ]


def loaded_by_modules() -> dict[str, set[str]]:
    """For each module of the package, those that importing it imports, one after the other."""
    files = {}
    for file in PACKAGE.rglob("*.py"):
        name = ".".join(["wellposed", *file.relative_to(PACKAGE).with_suffix("").parts])
        files[name.removesuffix(".__init__")] = file

    def module_and_packages(name: str) -> Iterator[str]:
        """Of ``wellposed.records.Record``: the module, and each package on the way."""
        parts = name.split(".")
        yield from (here for end in range(len(parts) + 1) if (here := ".".join(parts[:end])) in files)

    direct = {
        module: {
            found
            for name, is_late in imports(ast.parse(file.read_text(encoding="utf-8")))
            if not is_late
            for found in module_and_packages(name)
        }
        for module, file in files.items()
    }
    reached: dict[str, set[str]] = {}
    for module in direct:
        reached[module], waiting = set(), [module]
        while waiting:
            new = direct[waiting.pop()] - reached[module]
            reached[module] |= new
            waiting += new
    return reached


def test_imports_point_one_way() -> None:
    assert forbidden(edges(PACKAGE, "wellposed")) == []


def test_no_room_is_reached_through_files_at_the_root() -> None:
    """``wellposed.models`` knows the probes, so nothing that the surgery imports may import it."""
    reached = loaded_by_modules()
    rooms = {*ROOMS, "commands"}
    found = [
        f"{module} reaches {other}"
        for module, others in sorted(reached.items())
        if (room := room_of(module)) in ALLOWED
        for other in sorted(others)
        if room_of(other) in rooms.difference({room}, ALLOWED[room], *map(ALLOWED.__getitem__, ALLOWED[room]))
    ]
    assert found == []
    assert "wellposed.records" in reached["wellposed.report.page"]
    assert "wellposed.probes.observe" in reached["wellposed.models"]


def test_the_package_imports_neither_studies_nor_benchmarks() -> None:
    outside = {"studies", "benchmarks", "tests", "tools", "examples"}
    assert [each for each in edges(PACKAGE, "wellposed") if each[1] in outside] == []
    assert "studies" in {other for _, other, *_ in edges(ROOT / "tests" / "studies", "tests.studies")}


def test_the_way_through_the_trainer_names_all_of_its_files() -> None:
    """And is no longer than ten: who follows a run from ``fit`` to its last checkpoint reads these."""
    room = PACKAGE / "train"
    way = ast.get_docstring(ast.parse((room / "__init__.py").read_text()))
    assert way is not None
    steps = re.findall(r"^[0-9]+\. ``(\w+)``", way, re.MULTILINE)
    assert 5 < len(steps) <= 10
    here = {path.stem for path in room.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    named = set(re.findall(r"``(\w+)``", way)) - {"fit"}
    assert named == here - {"__init__"}


def test_the_check_can_fail() -> None:
    assert forbidden({("nn", "surgery", "a.py", False)}) == ["a.py: nn imports surgery"]
    assert forbidden({("report", "linalg", "a.py", True)}) == ["a.py: report imports linalg"]
    assert forbidden({("probes", "report", "a.py", False)}) == ["a.py: probes imports report"]
    assert forbidden({("probes", "report", "a.py", True), ("train", "probes", "a.py", False)}) == []


ACTIONS = {
    # What is done, and what it must not load.
    "import wellposed": ["torch", *(f"wellposed.{room}" for room in ROOMS)],
    "import wellposed.linalg": ["wellposed.linalg.hopper", "wellposed.nn", "wellposed.anatomy"],
    "import wellposed.nn": ["wellposed.linalg.hopper", "wellposed.anatomy", "wellposed.surgery"],
    "import wellposed.report": ["torch", "wellposed.linalg", "wellposed.probes", "wellposed.train"],
    "from wellposed import diagnose": ["wellposed.report", "wellposed.train", "matplotlib"],
    "from wellposed import gray_tokens": ["wellposed.probes", "wellposed.report", "wellposed.train"],
    "from wellposed.train.data import all_digits; all_digits()": ["wellposed.probes", "wellposed.report"],
    "from wellposed.nn.functional import gray; import torch; gray(torch.randn(2, 8, 4))": [
        "wellposed.linalg.hopper",
        "wellposed.anatomy",
    ],
    "from wellposed.report import write_report; "
    f"write_report([{str(ROOT / 'studies' / 'density' / 'small')!r}], 'page.html')": [
        "torch",
        "wellposed.linalg",
        "wellposed.probes",
        "wellposed.train",
    ],
}


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.partition(";")[0])
def test_an_action_loads_what_it_needs_alone(action: str, tmp_path: Path) -> None:
    asked = f"{action}\nimport sys\nprint([name for name in {ACTIONS[action]!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
