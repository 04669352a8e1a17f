"""What a report is about: runs and diagnoses in one form, whatever files they came from."""

import math
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from wellposed.calls import GRAY, PLACED_BY, defaults_of, plain_calls
from wellposed.graying_pictures import GrayingPictures
from wellposed.records import Record
from wellposed.text import ranges

COLLAPSED, NOT_FINISHED = "collapsed", "not finished"
_ASIDE = ("note", "warning", "checkpoint", "torn")
"""Events that may follow the one that ended a run."""
_ENDS = {
    "terminated": "stopped by a signal",
    "nonfinite": "stopped by a loss that is not finite",
    "error": "stopped by an error",
}


def state_of_run(lines: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> str:
    """Of ``run.jsonl``.

    Args:
        lines: as :func:`wellposed.run_records.read_run` gives them.
        summary: of :func:`wellposed.run_records.summarise`.

    >>> state_of_run([{"event": "terminated"}, {"event": "note"}], {"finished": False, "updates": 30})
    'not finished: stopped by a signal at update 30'
    """
    # An update that was skipped did not end the run.
    events = [line["event"] for line in lines if line["event"] not in _ASIDE and "left_out" not in line]
    how = _ENDS.get(events[-1] if events else "", "running or killed")
    return state(summary, f"{how} at update {summary['updates']}")


def state(summary: Mapping[str, Any], why_not: str) -> str:
    """In words.

    Args:
        summary: with ``finished``, and ``collapsed`` where it is known.
        why_not: what became of a run that is not finished.

    >>> state({"finished": True, "collapsed": True}, "")
    'finished, collapsed'
    """
    if not summary["finished"]:
        return f"{NOT_FINISHED}: {why_not}"
    return f"finished, {COLLAPSED}" if summary.get("collapsed") else "finished"


def mark(summary: Mapping[str, Any]) -> str:
    """What else a reader must know than the name; empty for a whole run, and for a diagnosis without summary.

    >>> mark({}), mark({"finished": False})
    ('', 'not finished')
    """
    if not summary.get("finished", True):
        return NOT_FINISHED
    return COLLAPSED if summary.get("collapsed") else ""


SEED_FIELDS = ("seed", "device", "workers", "placement", "trackers", "keep", "log_every")
"""Fields of a recipe in which the runs of one variant may differ."""
_LEFT_TO_RIGHT = ("L", "EN", "ES", "ET", "CS", "NSM", "B", "S", "WS", "ON", "")


@dataclass(frozen=True, kw_only=True)
class JacobianCurve:
    """One spectrum of a Jacobian, over its largest value.

    Args:
        panel: curves of one panel are drawn together.
        line: its name among them; several images and seeds may share it.
        points: number of values that the whole curve would have; ``values`` may be its upper part.
    """

    panel: str
    line: str = ""
    eps: float | None = None
    image: int = 0
    points: int
    values: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A run, or a diagnosis of a model.

    Args:
        name: unique in a report.
        group: runs that differ in their seed alone share it.
        kind: where its numbers come from.
        seed: of a run.
        edits: in words; none for the plain model.
        calls: the same as functions, each with its place.
        key: of what else must be equal to see what the edits changed: model and data.
        recipe: of a run, plain values.
        lines: of ``run.jsonl`` that count; each has ``epoch`` where it is known.
        summary: as :func:`wellposed.run_records.summarise` gives it; empty for a diagnosis.
        state: how a run ended, in words.
        records: of a diagnosis, of a study, or of the monitor's last look.
        measured_on: in words, where the records come from.
        jacobians: spectra that are no records.
        provenance: name -> text.
        is_random: whether its weights were never trained.
        graying: what graying does to images of its data.
    """

    name: str
    group: str = ""
    kind: Literal["run", "diagnosis"]
    seed: int | None = None
    edits: tuple[str, ...] = ()
    calls: tuple[tuple[str, str], ...] = ()
    key: tuple[str, ...] = ()
    recipe: Mapping[str, Any] = field(default_factory=dict)
    lines: Sequence[Mapping[str, Any]] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)
    state: str = ""
    records: tuple[Record, ...] = ()
    measured_on: str = ""
    jacobians: tuple[JacobianCurve, ...] = ()
    provenance: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    is_random: bool = False
    graying: GrayingPictures | None = None

    def has(self, kind: str, places: Sequence[str] = ()) -> bool:
        """Whether it has an edit of a function; at one of the places, if there are any."""
        return any(call == kind and (not places or place in places) for call, place in self.calls)

    def select(self, measure: str) -> list[Record]:
        return [record for record in self.records if record.measure == measure]

    def kappas(self) -> list[Record]:
        """Of the blocks' tokens, those that are known."""
        known = (r for r in self.select("kappa") if r.head is None and r.block is not None)
        return [r for r in known if r.value is not None and 0 < r.value < math.inf]

    @property
    def counts(self) -> bool:
        """Whether it belongs in a mean: a run that is not finished does not."""
        return mark(self.summary) != NOT_FINISHED

    @property
    def variant(self) -> str:
        """Runs of one variant are summarised together; one that is not finished stands alone."""
        return self.group if self.counts else self.name

    @property
    def test(self) -> Mapping[str, Any]:
        """The last test; empty without one."""
        return self.summary.get("test") or {}


@dataclass(frozen=True)
class Conclusion:
    """What a study came to, and what became of each of its claims where it has several."""

    sentence: str
    claims: tuple[str, ...] = ()


class Damage(NamedTuple):
    """A file, and what is wrong with it.

    >>> print(Damage("runs/a/run.jsonl", "line 3 is torn."))
    runs/a/run.jsonl: line 3 is torn.
    """

    path: str
    what: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what}"


class Found(NamedTuple):
    """What a path holds."""

    subjects: list[Subject]
    conclusions: list[Conclusion]
    damage: list[Damage]


@dataclass(frozen=True)
class Material:
    """Everything that a report is made from: subjects, what studies concluded, and what cannot be read.

    ``graying``: pictures to show in place of those of the subjects.
    """

    subjects: tuple[Subject, ...]
    conclusions: tuple[Conclusion, ...] = ()
    damage: tuple[Damage, ...] = ()
    graying: GrayingPictures | None = None

    @property
    def unfinished(self) -> list[Subject]:
        return [subject for subject in self.subjects if not subject.counts]

    def variants(self) -> dict[str, list[Subject]]:
        """What is summarised together."""
        return self._by("variant")

    def one_of_each(self) -> "Material":
        """Of each variant its first run, one that is finished before one that is not."""
        chosen = {min(of, key=lambda subject: not subject.counts).name for of in self.groups().values()}
        return replace(self, subjects=tuple(each for each in self.subjects if each.name in chosen))

    def groups(self) -> dict[str, list[Subject]]:
        """Runs of one recipe, finished or not."""
        return self._by("group")

    def _by(self, name: str) -> dict[str, list[Subject]]:
        found: dict[str, list[Subject]] = {}
        for subject in self.subjects:
            found.setdefault(getattr(subject, name), []).append(subject)
        return found


def with_unique_names(subjects: Sequence[Subject]) -> list[Subject]:
    """The second of a name is called ``name (2)``; a subject without a group is one of its own.

    >>> [each.name for each in with_unique_names([Subject(name="a", kind="run")] * 2)]
    ['a', 'a (2)']
    """
    named: list[Subject] = []
    taken: set[str] = set()
    for subject in subjects:
        name, number = subject.name, 1
        while name in taken:
            number += 1
            name = f"{subject.name} ({number})"
        taken.add(name)
        named.append(replace(subject, name=name, group=subject.group or name))
    return named


def with_marks(subjects: Sequence[Subject]) -> list[Subject]:
    """Runs that are not whole say so in their name, which every chart, table and menu shows.

    >>> with_marks([Subject(name="a", kind="run", summary={"finished": False})])[0].name
    'a (not finished)'
    """
    return [
        replace(each, name=f"{each.name} ({said})") if (said := mark(each.summary)) else each
        for each in subjects
    ]


def isolated(name: str) -> str:
    """A name among others in one text; what turns the direction of writing ends with the name.

    >>> isolated("plain"), len(isolated(f"a{chr(0x202E)}b"))
    ('plain', 5)
    """
    turns = any(unicodedata.bidirectional(letter) not in _LEFT_TO_RIGHT for letter in name)
    return f"\u2068{name}\u2069" if turns else name


def edits_of(recipe: Mapping[str, Any]) -> tuple[str, ...]:
    """The edits of a recipe in words.

    >>> edits_of({"edits": [{"edit": "gray_tokens", "method": "dct", "eps": 0.95, "where": "pixels"}]})
    ('DCT graying of the pixels, eps 0.95',)
    >>> edits_of({"edits": [{"edit": "gray_tokens", "eps": 0.7, "where": "blocks", "blocks": "0"}]})
    ('graying before block 0, eps 0.7',)
    >>> edits_of({"remove_skips": "ffn", "skip_blocks": "0-2"})  # of a version before 0.2.0
    ('no FFN skips in blocks 0-2',)
    """
    return tuple(map(_words_of, plain_calls(recipe)))


def calls_of(recipe: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """The edits of a recipe as functions, each with its place.

    >>> calls_of({"edits": [{"edit": "remove_skips"}, {"edit": "gray_tokens", "where": "pixels"}]})
    (('remove_skips', 'attention'), ('gray_tokens', 'pixels'))
    """
    made = []
    for call in plain_calls(recipe):
        kind, place = call["edit"], PLACED_BY.get(call["edit"])
        made.append((kind, str({**defaults_of(kind), **call}[place]) if place else ""))
    return tuple(made)


_METHODS = {"spectral": "graying", "svd": "SVD graying", "dct": "DCT graying"}


def _words_of(call: Mapping[str, Any]) -> str:
    kind, blocks = call["edit"], call.get("blocks")
    named = "" if blocks in (None, "", []) else ranges(blocks) if isinstance(blocks, list) else str(blocks)
    on = f"block{'' if named.isdigit() else 's'} {named}" if named else ""
    inside = f" in {on}" if on else ""
    if kind == GRAY:
        method, where = call.get("method", "spectral"), call.get("where", "embedding")
        power = [f"{name} {call[name]}" for name in ("eps", "eps_end", "target_kappa") if call.get(name)]
        of = f"before {on or 'each block'}" if where == "blocks" else f"of the {where}{inside}"
        return ", ".join([f"{_METHODS.get(method, f'graying ({method})')} {of}", *power])
    if kind == "broadcast_context":
        name = "CB_S" if call.get("scaled") else "Context Broadcasting"
        where = call.get("where", "mlp.end")
        own = [f"{key} {call[key]}" for key in ("mean", "difference", "learned") if call.get(key) is not None]
        return ", ".join([f"{name}{'' if where == 'mlp.end' else f' at {where}'}{inside}", *own])
    if kind == "uniform_heads":
        return f"uniform heads ({call.get('heads', 1)}){inside}"
    if kind == "remove_skips":
        return f"no {'FFN' if (which := call.get('which', 'attention')) == 'ffn' else which} skips{inside}"
    return f"{kind.replace('_', ' ')}{inside}"
