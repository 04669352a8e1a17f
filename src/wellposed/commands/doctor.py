"""``wellposed doctor``: versions, devices, and what is supported here.

>>> [each.name for each in required_packages() if not each.is_met]
[]
"""

import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from packaging.requirements import Requirement

from wellposed.commands.app import FIRST_STEPS, app, plain_errors
from wellposed.text import aligned

EXTRAS = {
    "train": "wellposed train, sweep and demo",
    "transformers": "models named hf:NAME, the Trainer's callback",
    "datasets": "--data hf:NAME and Parquet files",
    "ray": "sweeps on a cluster of machines",
    "lightning": "the callback for Lightning",
    "plot": "figures as PNG and SVG",
}
"""What each extra is for."""


@dataclass(frozen=True)
class Package:
    """A package that wellposed needs, or that an extra adds.

    Args:
        name, wanted: of the requirement: ``timm``, ``>=1.0.21``.
        found: the installed version, None where there is none.
        is_met: whether that version is within the range.
    """

    name: str
    wanted: str
    found: str | None
    is_met: bool


@dataclass(frozen=True)
class Extra:
    """An extra of the package: ``pip install 'wellposed[NAME]'``."""

    name: str
    purpose: str
    packages: tuple[Package, ...]

    @property
    def is_met(self) -> bool:
        return all(package.is_met for package in self.packages)


@dataclass(frozen=True)
class Support:
    """Something that depends on the machine; ``says`` is what works, or what to do instead."""

    name: str
    works: bool
    says: str


@dataclass(frozen=True)
class Examination:
    """Everything that the command prints."""

    wellposed: str
    python: str
    platform: str
    cores: int
    devices: tuple[str, ...]
    packages: tuple[Package, ...]
    extras: tuple[Extra, ...]
    support: tuple[Support, ...]

    @property
    def is_healthy(self) -> bool:
        """Whether every required package is there, in a version within its range."""
        return all(package.is_met for package in self.packages)

    def to_mapping(self) -> dict[str, Any]:
        """Plain values for JSON."""
        extras = [{**dataclasses.asdict(each), "is_met": each.is_met} for each in self.extras]
        return {"healthy": self.is_healthy, **dataclasses.asdict(self), "extras": extras}

    def __str__(self) -> str:
        machine = [("Python", self.python), ("platform", self.platform), ("CPU cores", str(self.cores))]
        machine += [("device", each) for each in self.devices]
        required = [
            (_mark(each.is_met), each.name, each.found or "not installed", f"wants {each.wanted}")
            for each in self.packages
        ]
        extras = [(_mark(each.is_met), each.name, each.purpose) for each in self.extras]
        support = [(_mark(each.works), each.name, each.says) for each in self.support]
        parts = [f"wellposed {self.wellposed}", aligned(machine)]
        for title, rows in (("required", required), ("extras", extras), ("here", support)):
            parts += ["", title, aligned(rows)]
        missing = [each.name for each in self.extras if not each.is_met]
        if missing:
            parts += ["", f"to add what is missing: pip install 'wellposed[{','.join(missing)}]'"]
        broken = [f"'{each.name}{each.wanted}'" for each in self.packages if not each.is_met]
        if broken:
            parts += ["", f"wellposed cannot run like this; pip install {' '.join(broken)}"]
        return "\n".join(parts)


def examine() -> Examination:
    """Look at this Python, this machine and what is installed."""
    from wellposed import __version__
    from wellposed.environment import usable_cores

    torch_is_there = importlib.util.find_spec("torch") is not None
    return Examination(
        wellposed=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        cores=usable_cores() or 1,
        devices=_devices() if torch_is_there else (),
        packages=tuple(required_packages()),
        extras=tuple(extras()),
        support=tuple(_support()) if torch_is_there else (),
    )


def required_packages() -> list[Package]:
    """What ``pip install wellposed`` asks for."""
    return [_package(each) for each in _requirements() if each.marker is None]


def extras() -> list[Extra]:
    """The extras that users install, each with its packages."""
    found = []
    for name, purpose in EXTRAS.items():
        own = [each for each in _requirements() if each.marker and each.marker.evaluate({"extra": name})]
        found.append(Extra(name, purpose, tuple(map(_package, own))))
    return found


@functools.cache
def _requirements() -> tuple[Requirement, ...]:
    try:
        lines = importlib.metadata.requires("wellposed") or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(
            "wellposed is imported from a folder and not installed, so its requirements are unknown; "
            "pip install it (in a clone: pip install -e .)."
        ) from error
    return tuple(Requirement(line) for line in lines)


def _package(requirement: Requirement) -> Package:
    wanted = str(requirement.specifier)
    try:
        found = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return Package(requirement.name, wanted, None, False)
    return Package(requirement.name, wanted, found, requirement.specifier.contains(found, prereleases=True))


def _devices() -> tuple[str, ...]:
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        memory = about.total_memory / 2**30
        found.append(f"cuda:{index} {about.name}, {memory:.0f} GiB, compute {about.major}.{about.minor}")
    if torch.backends.mps.is_available():
        found.append("mps")
    return (*found, f"cpu, {torch.get_num_threads()} threads in torch")


def _support() -> list[Support]:
    import torch

    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    return [_float64(mps and not cuda), _compiling(cuda), _hopper(cuda), _processes(), _offline()]


def _float64(is_mps: bool) -> Support:
    if is_mps:
        return Support("float64", False, "MPS has none: tokens are measured on the CPU; graying in float32")
    return Support("float64", True, "kappa, bounds and Jacobians are measured in it where they need it")


def _compiling(cuda: bool) -> Support:
    if cuda:
        works = importlib.util.find_spec("triton") is not None
        remedy = "torch.compile on the GPU needs triton; use --no-compile"
        return Support("compile", works, "torch.compile on the GPU and the CPU" if works else remedy)
    compiler = next(filter(shutil.which, (os.environ.get("CXX", ""), "g++", "clang++")), None)
    if compiler is None:
        return Support("compile", False, "torch.compile on a CPU needs a C++ compiler: g++ or clang++")
    return Support("compile", True, f"torch.compile on the CPU, by {compiler}")


def _hopper(cuda: bool) -> Support:
    import torch

    is_hopper = cuda and torch.cuda.get_device_capability() == (9, 0)
    if is_hopper and importlib.util.find_spec("triton") is not None:
        return Support("graying", True, "spectral graying by its own kernels (compute 9.0)")
    if cuda:
        return Support("graying", True, "spectral graying by batched products (kernels need 9.0)")
    return Support("graying", True, "spectral graying by the eigenvalues of the Gram matrix")


def _processes() -> Support:
    import torch

    if not torch.distributed.is_available():
        return Support("processes", False, "this torch was built without torch.distributed: one process only")
    backends = filter(torch.distributed.is_backend_available, ("nccl", "gloo"))
    return Support("processes", True, f"DDP and FSDP2, by {' and '.join(backends)}")


def _offline() -> Support:
    if os.environ.get("HF_HUB_OFFLINE", "") in ("1", "ON", "YES", "TRUE"):
        return Support("downloads", False, "HF_HUB_OFFLINE is set: --pretrained takes what is in the cache")
    return Support("downloads", True, "--pretrained and hf: names download to huggingface_hub's cache")


def _mark(is_fine: bool) -> str:
    return "ok" if is_fine else "--"


@app.command(rich_help_panel=FIRST_STEPS)
def doctor(
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show versions and devices, and what works on this machine.

    Exit code: 0 all that wellposed needs is there, 1 a required package is missing or too old.
    """
    with plain_errors():
        found = examine()
        typer.echo(json.dumps(found.to_mapping(), indent=1) if json_output else str(found))
    raise typer.Exit(0 if found.is_healthy else 1)
