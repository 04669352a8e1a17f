"""``records.jsonl`` of a study: whole recipes, results, curves and what was measured, in few bytes.

The first line has the recipe that the runs share, and each run what differs from it: a recipe is whole
without any default of the program, so a default that changes rewrites no history. A field that is absent was
None. Numbers have five digits, and rows with the same names become one table.

>>> rows = [{"measure": "kappa", "block": block, "value": value} for block, value in enumerate((3.0, 4.0))]
>>> packed_rows(rows)
[{'same': {'measure': 'kappa'}, 'columns': ['block', 'value'], 'rows': [[0, 3.0], [1, 4.0]]}]
>>> unpacked_rows(packed_rows(rows)) == rows
True
"""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from wellposed.files import parse_json, read_bytes, write_text
from wellposed.stats import Claim, Estimate

RECORDS, SUMMARY = "records.jsonl", "summary.json"
POINTS = 60
"""Of a curve, at most."""
DIGITS = 5

Rows = Sequence[Mapping[str, Any]]
Role = Literal["result", "start", "trial", "other setting"]
"""``result`` counts; others start from a ``start``; a ``trial`` was a short run that a setting was chosen by,
and an ``other setting`` a full run that was not chosen. Only results count in tables of variants."""


@dataclass(frozen=True)
class RunRecord:
    """One run.

    Args:
        label: the variant, as tables and figures call it.
        data: the set it was trained on, without its folder: ``cifar10``.
        seed: of the run.
        recipe: all fields of the run, with nothing open.
        state: ``finished``, ``nonfinite`` or ``failed``.
        result: its ``result.json``.
        curve: its tests: epoch, loss, accuracy, and the training loss before each.
        measured: what was measured on its last weights.
        chosen: settings of the variant that were chosen for it.
        role: see :data:`Role`.
        run: name of its folder.
    """

    label: str
    data: str
    seed: int
    recipe: Mapping[str, Any]
    state: str
    result: Mapping[str, Any]
    curve: Rows = ()
    measured: Rows = ()
    chosen: Mapping[str, Any] = field(default_factory=dict)
    role: Role = "result"
    run: str = ""

    @property
    def accuracy(self) -> float | None:
        """In percent, of the last test: the best one would be chosen on the test images.

        Of a run that came to a loss that is not finite, of the last test before. None of a test that could
        not score all of its images.
        """
        test = (self.result.get("test") or {}) if self.state in ("finished", "nonfinite") else {}
        is_whole = isinstance(test.get("loss", 0.0), (int, float)) and not test.get("nonfinite")
        value = test.get("accuracy") if is_whole else None
        return 100.0 * value if isinstance(value, (int, float)) else None

    @property
    def loss(self) -> float | None:
        """Of the last test."""
        value = (self.result.get("test") or {}).get("loss")
        return value if isinstance(value, (int, float)) else None


_NAMES = {each.name for each in dataclasses.fields(RunRecord)}
_OMITTED: dict[str, Any] = {"chosen": {}, "role": "result"}


@dataclass
class Ledger:
    """What a ``records.jsonl`` holds.

    Args:
        runs: one record each.
        measured: rows that were measured without a run.
        strange: how many lines are of another version.
        torn: numbers of the lines that are no JSON.
    """

    runs: list[RunRecord] = field(default_factory=list)
    measured: list[dict[str, Any]] = field(default_factory=list)
    strange: int = 0
    torn: list[int] = field(default_factory=list)


def read(folder: Path) -> Ledger:
    """The records of a study's folder; none if there is no file."""
    found = Ledger()
    path = folder / RECORDS
    base: Mapping[str, Any] | None = None
    for number, line in enumerate(read_bytes(path, 2**32).splitlines() if path.exists() else [], 1):
        values = _values(line)
        if values is None:
            found.torn.append(number)
        elif values.keys() == {"base"}:
            base = values["base"]
        elif "label" not in values:
            found.measured.append(values)
        elif values.keys() <= _NAMES and base is not None:
            found.runs.append(_unpacked(values, base))
        else:
            found.strange += 1
    return found


def write(folder: Path, runs: Iterable[RunRecord], measured: Iterable[Mapping[str, Any]] = ()) -> None:
    """The file is whole or not there."""
    folder.mkdir(parents=True, exist_ok=True)
    dump = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode
    lines = [*packed(runs), *map(rounded, measured)]
    write_text(folder / RECORDS, "".join(f"{dump(line)}\n" for line in lines))


def packed(runs: Iterable[RunRecord]) -> list[dict[str, Any]]:
    """Records as lines: what their recipes share, then the runs."""
    runs = list(runs)
    if not runs:
        return []
    base = shared([run.recipe for run in runs])
    lines: list[dict[str, Any]] = [{"base": rounded(base)}]
    for run in runs:
        values = {each.name: getattr(run, each.name) for each in dataclasses.fields(run)}
        values |= {name: packed_rows(rounded(list(values[name]))) for name in ("curve", "measured")}
        own = {name: value for name, value in run.recipe.items() if base.get(name) != value}
        # A field that others have and this run has not must not be filled in from the base: none is.
        values["recipe"] = dict(sorted(own.items()))
        lines.append(
            {name: rounded(value) for name, value in values.items() if _OMITTED.get(name, ...) != value}
        )
    return lines


def shared(recipes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the fields that all recipes have, the value that most of them have.

    >>> shared([{"lr": 0.1, "seed": 0}, {"lr": 0.1, "seed": 1, "eps": 0.7}, {"lr": 0.2, "seed": 1}])
    {'lr': 0.1, 'seed': 1}
    """
    found = {}
    for name in sorted(set.intersection(*map(set, recipes))):
        counts = Counter(json.dumps(recipe[name], sort_keys=True) for recipe in recipes)
        found[name] = json.loads(counts.most_common(1)[0][0])
    return found


def _values(line: bytes) -> dict[str, Any] | None:
    try:
        values = parse_json(line.decode())
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


def _unpacked(values: Mapping[str, Any], base: Mapping[str, Any]) -> RunRecord:
    rows = {name: unpacked_rows(values.get(name, ())) for name in ("curve", "measured")}
    return RunRecord(**{**values, **rows, "recipe": {**base, **values["recipe"]}})


def rounded(value: Any, digits: int = DIGITS) -> Any:
    """Numbers to five digits: more are not measured.

    >>> rounded({"kappa": [123.456789, 1e-9], "n": 3})
    {'kappa': [123.46, 1e-09], 'n': 3}
    """
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, Mapping):
        return {name: rounded(each, digits) for name, each in value.items()}
    return [rounded(each, digits) for each in value] if isinstance(value, (list, tuple)) else value


def thinned(points: Sequence[Any], most: int = POINTS) -> list[Any]:
    """So many of them, evenly, the first and the last among them.

    >>> thinned(range(10), 4)
    [0, 3, 6, 9]
    """
    if len(points) <= most:
        return list(points)
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def packed_rows(rows: Rows) -> list[dict[str, Any]]:
    """Rows that have the same names and the same ``measure`` as one table each."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row.get("measure"), *row), []).append(row)
    tables = []
    for (_, *names), own in groups.items():
        same = [name for name in names if len(own) > 1 and all(row[name] == own[0][name] for row in own)]
        columns = [name for name in names if name not in same]
        tables.append(
            {
                "same": {name: own[0][name] for name in same},
                "columns": columns,
                "rows": [[row[name] for name in columns] for row in own],
            }
        )
    return tables


def unpacked_rows(tables: Rows) -> list[dict[str, Any]]:
    """What :func:`packed_rows` packed, table by table."""
    return [
        {**table["same"], **dict(zip(table["columns"], row, strict=True))}
        for table in tables
        for row in table["rows"]
    ]


def claim_to_dict(claim: Claim) -> dict[str, Any]:
    """As it stands in ``summary.json``: what is infinite is None, and the verdict is there for readers."""
    values = dataclasses.asdict(claim)
    if claim.estimate is not None:
        values["estimate"] = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values["estimate"].items()
        }
    return {**rounded(values), "verdict": claim.verdict.value}


def claim_from_dict(values: Mapping[str, Any]) -> Claim:
    """What :func:`claim_to_dict` made.

    >>> claim = Claim("CB helps", "CB - none, points", "higher", Estimate(1.0, 1))
    >>> claim_from_dict(claim_to_dict(claim)) == claim
    True
    """
    given = {name: value for name, value in values.items() if name != "verdict"}
    estimate = given.get("estimate")
    if estimate is not None:
        ends = {"low": -math.inf, "high": math.inf}
        finite: dict[str, Any] = {
            name: ends.get(name) if value is None else value for name, value in estimate.items()
        }
        given["estimate"] = Estimate(**finite)
    return Claim(**given)


def sentence(claim: Claim) -> str:
    """A claim with its verdict, for people.

    >>> sentence(Claim("CB helps", "CB - none, points", "higher", Estimate(1.0, 1), paper=0.4))
    'CB helps (CB - none, points): +1.00, n = 1; the paper +0.4: undecided'
    """
    found = "not measured" if claim.estimate is None else str(claim.estimate)
    paper = "" if claim.paper is None else f"; the paper {claim.paper:+g}"
    margin = "" if claim.margin is None else f"; margin {claim.margin:g}"
    why = f" ({claim.differs})" if claim.differs else ""
    return f"{claim.name} ({claim.contrast}): {found}{margin}{paper}: {claim.verdict.value}{why}"
