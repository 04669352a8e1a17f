"""What pyproject.toml says is so: imports are declared, and the development install is pinned."""

import ast
import importlib.metadata
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
INSTALLED = importlib.metadata.packages_distributions()
COMES_WITH = {"triton": "torch"}  # on Linux; imported only where it is found


def names(requirements: Iterable[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


NEEDED = names(PROJECT["dependencies"])
OF_EXTRAS = {
    name
    for extra in ("train", "transformers", "datasets", "ray", "lightning", "plot", "pandas")
    for name in names(PROJECT["optional-dependencies"][extra])
}


def imported(nodes: Iterable[ast.AST]) -> set[str]:
    """The packages of others that these statements import."""
    modules = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules.add(str(node.module))
    packages = {module.partition(".")[0] for module in modules}
    return packages - set(sys.stdlib_module_names) - {"wellposed"}


def distributions(package: str) -> set[str]:
    of_package = INSTALLED.get(package, [package])
    return {COMES_WITH.get(name, name) for name in map(canonicalize_name, of_package)}


def test_what_is_imported_is_declared() -> None:
    for path in SOURCES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        # A module for users of a library may import it.
        usual = NEEDED | OF_EXTRAS if path.parent.name == "integrations" else NEEDED
        for package in imported(tree.body):
            assert distributions(package) & usual, f"{path}: {package} is not in dependencies"
        for package in imported(ast.walk(tree)):
            assert distributions(package) & (NEEDED | OF_EXTRAS), f"{path}: {package} is declared nowhere"


def test_the_development_install_is_pinned_within_its_ranges() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    pinned = {}
    for pin in pins:
        (exact,) = pin.specifier
        assert (exact.operator, pin.url, pin.marker) == ("==", None, None), pin
        assert Version(exact.version).local is None, f"{pin} is one build of a release"
        pinned[canonicalize_name(pin.name)] = exact.version
    assert "wellposed" not in pinned
    extras = PROJECT["optional-dependencies"].values()
    ranges = [Requirement(text) for texts in (PROJECT["dependencies"], *extras) for text in texts]
    for wanted in ranges:
        if wanted.name != "wellposed":
            version = pinned.get(canonicalize_name(wanted.name))
            assert version is not None, f"{wanted.name} is not pinned: make constraints"
            assert wanted.specifier.contains(version), f"{wanted}, pinned {version}: make constraints"


def warn(module: str, caller: str, category: type[Warning]) -> None:
    """A warning of upstream's ``module`` about the call that ``caller`` made."""
    upstream: dict[str, object] = {"__name__": module, "category": category}
    exec("import warnings\ndef old(): warnings.warn('old', category, stacklevel=2)", upstream)
    exec("old()", {"__name__": caller, "old": upstream["old"]})


@pytest.mark.parametrize("category", [DeprecationWarning, FutureWarning])
def test_only_warnings_about_our_own_calls_are_errors(category: type[Warning]) -> None:
    warn("torch", "timm.layers", category)
    warn("torch", "wellposedness", category)
    for ours in ("wellposed", "wellposed.nn.graying"):
        with pytest.raises(category):
            warn("timm", ours, category)
