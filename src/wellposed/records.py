"""The typed rows that flow from a measurement to a table, a file or a report.

A record says what was measured, where, and how the number was made: which estimator, in which dtype, to
which tolerance, from how many images, and whether it is the value or only a bound of it.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, get_args

from wellposed.files import read_json as read_any_json
from wellposed.files import write_cells, write_text

Status = Literal["ok", "at least", "at most", "not converged", "not measured"]
"""``at least`` and ``at most``: the value is a bound, the arithmetic cannot tell more. ``not measured``:
there is no such quantity here, ``note`` says why."""

VERDICTS = ("holds", "holds trivially", "violated", "cannot tell")
"""On a bound. Trivially: it is infinite. Cannot tell: of the quantity only a lower bound is known, which lies
below it."""


class Measure(StrEnum):
    """What tables and pages look for. Other measures (ranks, norms, gradients, ...) go by their names alone.

    >>> Measure.KAPPA == "kappa", "kappa 4.1 linear" in BOUNDED
    (True, True)
    """

    KAPPA = "kappa"
    SPECTRUM = "spectrum"
    RANK_DEFICIENT = "rank deficient"
    ENTROPY = "entropy"
    IMAGE = "image"
    ATTENTION_PICTURE = "attention picture"
    ATTENTION_ROLLOUT = "attention rollout"
    JACOBIAN_KAPPA = "jacobian kappa"
    JACOBIAN_LARGEST = "jacobian sigma max"
    JACOBIAN_SMALLEST = "jacobian sigma min"
    KAPPA_41_LINEAR = "kappa 4.1 linear"
    KAPPA_41_SOFTMAX = "kappa 4.1 softmax"
    KAPPA_42_LINEAR = "kappa 4.2 linear"
    KAPPA_42_SOFTMAX = "kappa 4.2 softmax"
    KAPPA_FFN = "kappa ffn"
    KAPPA_FFN_LINEAR = "kappa ffn linear"
    KAPPA_CONVOLUTION = "kappa convolution"
    KAPPA_CONVOLUTION_LINEAR = "kappa convolution linear"


OF_ATTENTION = (Measure.ATTENTION_PICTURE, Measure.ATTENTION_ROLLOUT)
OF_JACOBIANS = (Measure.JACOBIAN_KAPPA, Measure.JACOBIAN_LARGEST, Measure.JACOBIAN_SMALLEST)
BOUNDED = (
    *(Measure.KAPPA_41_LINEAR, Measure.KAPPA_41_SOFTMAX, Measure.KAPPA_42_LINEAR, Measure.KAPPA_42_SOFTMAX),
    *(Measure.KAPPA_FFN, Measure.KAPPA_FFN_LINEAR),
    *(Measure.KAPPA_CONVOLUTION, Measure.KAPPA_CONVOLUTION_LINEAR),
)
"""Kappas that a theorem bounds."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One measured quantity.

    Args:
        measure: what: ``"kappa"``, ``"effective rank"``, ``"entropy"``, ...
        value: the median over the images unless ``note`` says otherwise; None where not measured.
        block: index of the block, None for the whole model.
        module: name of the module in the model.
        position: where in the block: ``"input"``, ``"attention.branch"``, ``"ffn.sum"``, ...
        head: index of the attention head, None for all.
        low, high: quartiles over the images; for an estimate of one image, its error bar.
        bound: what a theorem says the value stays below.
        verdicts: for how many images (or windows) each of :data:`VERDICTS` is true.
        margins: bound over value, the median and the smallest over the images (or windows) where it is known.
        images: from how many images.
        status: see :data:`Status`.
        note: what else a reader should know.
        estimator: how the number was made.
        dtype: of the tokens or weights it was made from.
        tolerance: relative error of the estimator, None where it is not known.
        samples: the value of each image; None where it is not known.
        at_least: indices of the samples that are lower bounds only.
        curve: a sequence that is the result itself: a mean spectrum, or a picture row by row.
        shape: rows and columns of such a picture.
    """

    measure: str
    value: float | None
    block: int | None = None
    module: str = ""
    position: str = ""
    head: int | None = None
    low: float | None = None
    high: float | None = None
    bound: float | None = None
    verdicts: tuple[int, ...] = ()
    margins: tuple[float, ...] = ()
    images: int = 0
    status: Status = "ok"
    note: str = ""
    estimator: str = ""
    dtype: str = ""
    tolerance: float | None = None
    samples: tuple[float | None, ...] = ()
    at_least: tuple[int, ...] = ()
    curve: tuple[float, ...] = ()
    shape: tuple[int, ...] = ()

    @property
    def log(self) -> float | None:
        """Natural logarithm of the value, as the paper reports kappa."""
        return math.log(self.value) if self.value is not None and self.value > 0 else None

    @property
    def key(self) -> tuple[Any, ...]:
        """What identifies the quantity, to find it in another diagnosis."""
        return (self.measure, self.block, self.position, self.head)

    def text(self) -> str:
        """The value for people, with its status."""
        if self.value is None:
            return "-"
        number = short(self.value)
        match self.status:
            case "at least":
                return f"≥ {number}"
            case "at most":
                return f"≤ {number}"
            case "not converged":
                return f"~ {number}"
            case _:
                return number


def short(value: float) -> str:
    """Three digits, with an exponent where it is shorter; also of what is not finite.

    >>> short(0.98765), short(123456.0), short(3e7), short(math.inf)
    ('0.988', '1.23e5', '3e7', 'inf')
    """
    if not math.isfinite(value):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def not_measured(measure: str, reason: str, **where: Any) -> Record:
    """A record of what is not there."""
    return Record(measure=measure, value=None, status="not measured", note=reason, **where)


def of_outputs(records: Iterable[Record]) -> list[Record]:
    """Of records of tokens, those at the outputs of the blocks: the last sum of each."""
    records = list(records)
    last = {record.block: record.position for record in records if record.position.endswith(".sum")}
    return [record for record in records if record.position == last.get(record.block)]


AT_LEAST = "/at_least"
"""Where numbers are kept by name, ``NAME/at_least`` next to NAME says that its number is a lower bound."""


def named_text(numbers: Mapping[str, Any], name: str) -> str:
    """A number by its name for people, as :meth:`Record.text`.

    >>> named_text({"kappa/0/input": 9.9e6, "kappa/0/input/at_least": 1.0}, "kappa/0/input")
    '≥ 9.9e6'
    """
    return ("≥ " if numbers.get(name + AT_LEAST) else "") + short(numbers[name])


def dtype_name(dtype: object) -> str:
    """``float32`` for torch.float32."""
    return str(dtype).removeprefix("torch.")


_SEQUENCES = ("verdicts", "margins", "samples", "at_least", "curve", "shape")
_FIELDS = tuple(field.name for field in dataclasses.fields(Record) if field.name not in _SEQUENCES)
COLUMNS = (*_FIELDS, "log")
"""Of a table of records."""


def write_csv(records: Iterable[Record], path: str | Path) -> None:
    """One line a record, with ``log``; the samples and curves are in the JSON alone."""
    write_cells(path, [list(COLUMNS), *rows(records)])


def rows(records: Iterable[Record]) -> list[list[Any]]:
    """The cells of each record, as :data:`COLUMNS` names them."""
    return [[*(getattr(record, name) for name in _FIELDS), record.log] for record in records]


def to_dict(record: Record) -> dict[str, Any]:
    """For JSON; what holds nothing is skipped."""
    return {
        field.name: getattr(record, field.name)
        for field in dataclasses.fields(Record)
        if field.name in ("measure", "value") or getattr(record, field.name) not in (None, "", ())
    }


def from_dict(values: dict[str, Any]) -> Record:
    known = {field.name for field in dataclasses.fields(Record)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(f"a record has the fields {', '.join(sorted(known))}, got {', '.join(unknown)} too.")
    fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    for name, value in fields.items():
        if not _fits(name, value):
            raise ValueError(f"a record has other values as its {name}, got {str(value)[:40]!r}.")
    return Record(**fields)


def _fits(name: str, value: Any) -> bool:
    if name in _SEQUENCES:
        return isinstance(value, tuple) and all(_is_number(each) or each is None for each in value)
    if name == "status":
        return value in get_args(Status)
    if name in ("measure", "module", "position", "note", "estimator", "dtype"):
        return isinstance(value, str)
    # In studies the head may be "each".
    return value is None or _is_number(value) or (name == "head" and isinstance(value, str))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def write_json(records: Sequence[Record], about: dict[str, Any], path: str | Path) -> None:
    """A file with :func:`json_text` in it."""
    write_text(path, json_text(records, about))


def json_text(records: Sequence[Record], about: dict[str, Any]) -> str:
    """One JSON object: ``about`` and ``records``."""
    content = {"about": about, "records": [to_dict(record) for record in records]}
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def read_json(path: str | Path) -> tuple[list[Record], dict[str, Any]]:
    """What :func:`write_json` wrote."""
    content = read_any_json(path)
    expected = {"about": dict, "records": list}
    is_one = isinstance(content, dict) and all(isinstance(content.get(k), v) for k, v in expected.items())
    if not is_one or not all(isinstance(record, dict) for record in content["records"]):
        raise ValueError(
            f"expected a diagnosis with 'about' and 'records' in {path}; Diagnosis.to_json writes one."
        )
    return [from_dict(values) for values in content["records"]], content["about"]
