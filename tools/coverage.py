"""Try every edit and every probe on every kind of model, and write down what works: docs/coverage.md.

    python tools/coverage.py [NAME ...]

Names of models, libraries or timm's modules measure these again and keep the others. The data are in
results/coverage.json. What the runs have proven goes to src/wellposed/anatomy/proven.json, so that a user's
model of the same classes needs no run.
"""

import datetime
import importlib.metadata
import json
import multiprocessing
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import wellposed as wp
from subjects import Subject, subjects, variants
from wellposed.anatomy.example import Example, eagerly, given_example, made_examples, preserved
from wellposed.anatomy.model import Block
from wellposed.anatomy.model import blocks as all_blocks
from wellposed.anatomy.proof import Proofs, proofs
from wellposed.anatomy.table import Position
from wellposed.errors import NoMeaningError
from wellposed.probes.bounds import bounds
from wellposed.probes.jacobian import jacobian_spectrum
from wellposed.records import Record

JOBS = int(os.environ.get("JOBS", os.cpu_count() or 1))
ROOT = Path(__file__).parent.parent
DATA = ROOT / "results" / "coverage.json"
PROVEN = ROOT / "src" / "wellposed" / "anatomy" / "proven.json"
PAGE = ROOT / "docs" / "coverage.md"
LIBRARIES = ("timm", "torchvision", "transformers", "torch")

UNTRIED = "not tried yet"

EDITS: dict[str, Callable[..., wp.Edits]] = {
    "skip attention": partial(wp.remove_skips, which="attention", allow_drop_path=True),
    "skip ffn": partial(wp.remove_skips, which="ffn", allow_drop_path=True),
    "skip all": partial(wp.remove_skips, which="all", allow_drop_path=True),
    "gray embedding": partial(wp.gray_tokens, where="embedding"),
    "gray pixels": partial(wp.gray_tokens, where="pixels"),
    "gray blocks": partial(wp.gray_tokens, where="blocks"),
    "broadcast attention.end": partial(wp.broadcast_context, where="attention.end"),
    "broadcast mlp.start": partial(wp.broadcast_context, where="mlp.start"),
    "broadcast mlp.middle": partial(wp.broadcast_context, where="mlp.middle"),
    "broadcast mlp.end": partial(wp.broadcast_context, where="mlp.end"),
    "uniform heads": wp.uniform_heads,
}
PROBES = ("conditioning", "density", "bounds", "jacobian")


@dataclass
class Tried:
    """One edit or probe on one model: on how many of its blocks it works, and why not on the others."""

    works: bool
    blocks: int = 0
    reasons: list[str] = field(default_factory=list)


@dataclass
class Covered:
    """One model: its blocks by class, and what works on it."""

    library: str
    kind: str
    name: str
    blocks: dict[str, int]
    tried: dict[str, Tried]
    trouble: str = ""
    seconds: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.blocks.values())

    @property
    def is_covered(self) -> bool:
        """Whether skips around attention can be removed and the tokens of blocks measured."""
        works = {name for name, tried in self.tried.items() if tried.works}
        return "conditioning" in works and not works.isdisjoint({"skip attention", "skip all"})


def cover(subject: Subject) -> Covered:
    started = time.perf_counter()
    covered = Covered(subject.library, subject.kind, subject.name, {}, {})
    model = subject.model()
    try:
        example = _example(model, subject)
        found = all_blocks(model, example=example)
    except Exception as error:
        covered.trouble = _sentence(str(error), [])
        return covered
    for block in found:
        name = type(block.module).__name__
        covered.blocks[name] = covered.blocks.get(name, 0) + 1
    plain = _outputs(model, example)
    for name, edit in EDITS.items():
        covered.tried[name] = _edited(model, edit, example, plain, found)
    if not all(torch.equal(a, b) for a, b in zip(plain, _outputs(model, example), strict=True)):
        raise RuntimeError(f"{subject.name} is not what it was after wp.restore")
    for name in PROBES:
        covered.tried[name] = _probed(model, name, example, found)
    covered.seconds = round(time.perf_counter() - started, 1)
    return covered


def _example(model: nn.Module, subject: Subject) -> Example:
    if subject.example is not None:
        return given_example(model, subject.example)
    return made_examples(model)[0][2]


def _outputs(model: nn.Module, example: Example) -> list[Tensor]:
    with torch.no_grad(), preserved(model), eagerly():
        output = example.run(model)
    output = output.to_tuple() if hasattr(output, "to_tuple") else output
    return [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]


def _edited(
    model: nn.Module,
    edit: Callable[..., wp.Edits],
    example: Example,
    plain: list[Tensor],
    found: list[Block],
) -> Tried:
    try:
        made = edit(model)
        edited = _outputs(model, example)
    except Exception as error:
        wp.restore(model)
        return Tried(False, 0, _reasons(error, model, found))
    wp.restore(model)
    if not all(torch.isfinite(x).all() for x in edited):
        return Tried(False, 0, ["the output is not finite"])
    if all(torch.allclose(a, b, rtol=1e-6, atol=0) for a, b in zip(plain, edited, strict=True)):
        return Tried(False, 0, ["the output is the same as without it"])
    touched = {one.block for one in made if one.block is not None}
    others = [block for block in found if block.index not in touched]
    return Tried(True, len(touched), sorted({*_refusals(others), *_without_a_place(edit, others)}))


def _probed(model: nn.Module, name: str, example: Example, found: list[Block]) -> Tried:
    inputs: Any = example.args[0] if example.args else dict(example.kwargs)
    if isinstance(inputs, dict) and len(inputs) == 1:
        (inputs,) = inputs.values()
    usable = [block for block in found if not block.row.refused]
    attending = [block for block in usable if {"attention", "parallel"} & set(block.row.roles)]
    one = next(iter(attending + usable), None)
    try:
        if name == "bounds":
            records = bounds(model, inputs, images_limit=1, blocks=one.index if one else None, strict=False)
        elif name == "jacobian":
            block, part = (one.index, one.row.names[0]) if one else (0, "attention")
            spectrum = jacobian_spectrum(model, inputs, block=block, part=part, max_steps=3, k=1)
            records = spectrum.records()
        else:
            diagnosis = wp.diagnose(model, inputs, what=name, progress=False)  # type: ignore[arg-type]
            records = list(diagnosis.records)
    except Exception as error:
        return Tried(False, 0, _reasons(error, model, found))
    return _told(records, found)


def _told(records: Iterable[Record], found: list[Block]) -> Tried:
    """The blocks for which there is a number, and why there is none for the others."""
    records = list(records)
    numbers = {record.block for record in records if record.value is not None}
    others = [record for record in records if record.block not in numbers]
    reasons = _sentences((record.note for record in others if record.note), found)
    return Tried(bool(numbers), len(numbers), reasons)


def _reasons(error: Exception, model: nn.Module, found: list[Block]) -> list[str]:
    if isinstance(error, NoMeaningError) and error.reasons:
        return _sentences(error.reasons, found)
    if isinstance(error, wp.SeamError) and any(block.row.refused for block in found):
        return _refusals(found)
    if type(error) in (RuntimeError, IndexError, KeyError, AttributeError):  # no answer for people: a bug
        raise error
    return [_sentence(str(error).replace(type(model).__name__, "it"), found)]


def _refusals(found: list[Block]) -> list[str]:
    return _sentences((block.row.refused for block in found if block.row.refused), found)


def _without_a_place(edit: Callable[..., wp.Edits], found: list[Block]) -> Iterable[str]:
    """Why an operation has no place in some blocks."""
    where = getattr(edit, "keywords", {}).get("where")
    if where in get_args(Position):
        for block in found:
            if not block.row.refused and isinstance(tap := block.row.tap(where), str):
                yield _sentence(tap, found)


def _sentences(texts: Iterable[str], found: list[Block]) -> list[str]:
    return sorted({_sentence(text, found) for text in texts})


def _sentence(text: str, found: list[Block]) -> str:
    """What is wrong, of a message that also says what to do; blocks have no names of their own."""
    for block in found:
        text = re.sub(rf"(?<![\w.]){re.escape(block.name)}\.", "its ", text)
        text = re.sub(rf"(?<![\w.]){re.escape(block.name)}(?!\w)", "the block", text)
    return re.split(r"[;.] ", " ".join(text.split()))[0].rstrip(".")


def page(models: list[Covered], about: dict[str, Any]) -> str:
    """The generated part of the page."""
    notes: dict[str, int] = {}
    lines = [
        f"Made on {about['date']} with "
        + ", ".join(f"{library} {version}" for library, version in about["versions"].items())
        + ".",
        "",
        *(f"- {line}" for line in _summary(models)),
        "",
    ]
    for title, chosen in (
        ("timm", [m for m in models if m.library == "timm"]),
        ("torchvision", [m for m in models if m.library == "torchvision"]),
        ("transformers, vision", [m for m in models if m.kind == "vision"]),
        ("transformers, text and sound", [m for m in models if m.kind == "text and sound"]),
    ):
        lines += [f"## {title}", "", *_table(chosen, notes), ""]
    lines += ["## Notes", ""]
    lines += [f"{number}. {reason}" for reason, number in notes.items()]
    return "\n".join(lines)


def _summary(models: list[Covered]) -> list[str]:
    def count(chosen: list[Covered], what: str) -> str:
        tried = [model for model in chosen if model.trouble != UNTRIED]
        others = [model for model in tried if not model.is_covered]
        missing = ", ".join(model.kind if what == "module" else model.name for model in others)
        named = f"{len(tried) - len(others)} of {len(tried)}" + (f" (not {missing})" if missing else "")
        waiting = len(chosen) - len(tried)
        return named + (f" tried, {waiting} still to be tried, of the" if waiting else "")

    timm = [m for m in models if m.library == "timm"]
    vision = [m for m in models if m.kind == "vision"]
    text = [m for m in models if m.kind == "text and sound"]
    tv = [m for m in models if m.library == "torchvision"]
    return [
        f"timm: {count(timm, 'module')} modules with self-attention.",
        f"torchvision: {count(tv, 'model')} transformers.",
        f"transformers: {count(vision, 'model')} vision models, {count(text, 'model')} of text and sound.",
    ]


COLUMNS = {
    "skips": ("skip attention", "skip ffn", "skip all"),
    "graying": ("gray embedding", "gray pixels", "gray blocks"),
    "broadcasting": (
        "broadcast attention.end",
        "broadcast mlp.start",
        "broadcast mlp.middle",
        "broadcast mlp.end",
    ),
    "heads": ("uniform heads",),
    "κ": ("conditioning",),
    "density": ("density",),
    "bounds": ("bounds",),
    "Jacobian": ("jacobian",),
}

OF_ONE_PLACE = ("gray embedding", "gray pixels", "bounds", "jacobian")
"""Not of all blocks: they work or do not."""


NOT = "\N{EN DASH}"


def _table(models: list[Covered], notes: dict[str, int]) -> list[str]:
    lines = ["| model | blocks | " + " | ".join(COLUMNS) + " | notes |", "| --- " * (len(COLUMNS) + 3) + "|"]
    for model in models:
        called = f"{model.kind}: `{model.name}`" if model.library == "timm" else model.name
        reasons = {model.trouble: None} if model.trouble else {}
        for tried in model.tried.values():
            reasons |= dict.fromkeys(tried.reasons)
        cells = [" ".join(_mark(model, name) for name in names) for names in COLUMNS.values()]
        numbers = [str(notes.setdefault(reason, len(notes) + 1)) for reason in reasons]
        kinds = ", ".join(f"{count} {cls}" for cls, count in model.blocks.items()) or "none"
        lines.append(f"| {called} | {kinds} | " + " | ".join(cells) + f" | {', '.join(numbers)} |")
    return lines


def _mark(model: Covered, name: str) -> str:
    tried = model.tried.get(name)
    if tried is None or not tried.works:
        return NOT
    return "✓" if name in OF_ONE_PLACE or tried.blocks == model.count else "◐"


def write(models: list[Covered], about: dict[str, Any]) -> None:
    data = {**about, "models": [asdict(model) for model in models]}
    DATA.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8")
    begin, end = "<!-- made by make coverage -->\n", "<!-- end -->"
    before, after = text.split(begin)[0], text.split(end)[1]
    PAGE.write_text(before + begin + "\n" + page(models, about) + "\n\n" + end + after, encoding="utf-8")


def read() -> list[Covered]:
    if not DATA.exists():
        return []
    models = json.loads(DATA.read_text(encoding="utf-8"))["models"]
    return [
        Covered(**model | {"tried": {name: Tried(**one) for name, one in model["tried"].items()}})
        for model in models
    ]


def _work(subject: Subject) -> tuple[Covered | None, dict[str, Any]]:
    """What works on one model, and what its runs have proven."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    known = proofs()
    for part in vars(known).values():
        part.clear()
    try:
        covered = cover(subject) if subject.kind != "variant" else _prove(subject)
    except Exception as error:  # the others are to be measured all the same
        covered = Covered(
            subject.library, subject.kind, subject.name, {}, {}, f"{type(error).__name__}: {error}"
        )
    return covered, known.to_json()


def _untried(subject: Subject) -> Covered:
    return Covered(subject.library, subject.kind, subject.name, {}, {}, UNTRIED)


def _prove(subject: Subject) -> None:
    all_blocks(subject.model())


def main(wanted: set[str]) -> None:
    warnings.filterwarnings("ignore")
    versions = {library: importlib.metadata.version(library).partition("+")[0] for library in LIBRARIES}
    about = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "versions": versions}
    known = {(model.library, model.name): model for model in read()}
    models = list(subjects())
    if wanted:
        chosen = [
            one
            for one in (*models, *variants())
            if {one.name, one.name.partition(" ")[0], one.kind, one.library} & wanted
        ]
        proven = proofs()
    else:
        chosen, proven = [*models, *variants()], Proofs()
    proven.tested = {library: [versions[library]] * 2 for library in LIBRARIES if library != "torch"}
    with ProcessPoolExecutor(JOBS, multiprocessing.get_context("spawn")) as pool:
        for subject, (covered, found) in zip(chosen, pool.map(_work, chosen), strict=True):
            proven.load(found)
            if covered is not None:
                known[subject.library, subject.name] = covered
                works = sum(tried.works for tried in covered.tried.values())
                print(f"{subject.name}: {works} of {len(EDITS) + len(PROBES)} {covered.trouble}")
            write([known.get((one.library, one.name)) or _untried(one) for one in models], about)
            text = json.dumps(proven.to_json(), separators=(",", ":"), ensure_ascii=False)
            PROVEN.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(set(sys.argv[1:]))
