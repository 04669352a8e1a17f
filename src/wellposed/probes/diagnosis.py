"""What was measured on a model, to print, to keep and to compare."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wellposed.probes.tables import (
    TOKEN_MEASURES,
    Table,
    as_html,
    as_text,
    block_table,
    bounds_table,
    grid_tables,
    most_changed_first,
    pair_table,
    rest_table,
    token_table,
    without_repeats,
)
from wellposed.records import COLUMNS, Record, json_text, read_json, rows, write_csv, write_json


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """The records of one model.

    ``print`` shows a table with the worst block first; a notebook shows the same in colours, and heat maps.

    Args:
        records: everything measured.
        about: the model, its edits, the images and notes for the reader.

    >>> from wellposed.records import Record
    >>> where = {"measure": "kappa", "position": "input"}
    >>> kappas = [Record(value=8.0, block=0, **where), Record(value=90.0, block=1, **where)]
    >>> print(Diagnosis(tuple(kappas), {"model": "ViT"}))
    ViT
    <BLANKLINE>
    block  module  input
    1                 90
    0                  8
    kappa (condition number) of the tokens at each position, median over the
    images; worst block first
    """

    records: tuple[Record, ...]
    about: dict[str, Any] = field(default_factory=dict)

    def select(self, measure: str | None = None, **where: Any) -> list[Record]:
        """The records of a measure, and of a ``block``, ``position``, ``head`` or ``status``.

        ``diagnosis.select("kappa", position="attention.branch")`` is one record a block.
        """
        wanted = where | ({"measure": measure} if measure is not None else {})
        return [
            record
            for record in self.records
            if all(getattr(record, name) == value for name, value in wanted.items())
        ]

    @property
    def notes(self) -> list[str]:
        """What a reader should know besides the numbers."""
        notes: list[str] = self.about.setdefault("notes", [])
        return notes

    def __str__(self) -> str:
        title = f"{self.about.get('model', 'model')}{_images(self.about)}"
        parts = [title, *map(as_text, self._tables())]
        edits = self.about.get("edits", [])
        parts.append("\n".join(f"edited: {edit}" for edit in edits))
        parts.append("\n".join(f"note: {note}" for note in self.notes))
        return "\n\n".join(part for part in parts if part)

    def __repr__(self) -> str:
        return str(self)

    def _tables(self) -> list[Table]:
        """Measures of tokens are in short where they were not asked for alone."""
        rest, in_short = self.records, []
        if self.select("kappa"):
            rest = tuple(record for record in rest if record.measure not in TOKEN_MEASURES)
            in_short = [token_table(self.records)]
        return [block_table(rest), *in_short, *grid_tables(rest), bounds_table(rest), rest_table(rest)]

    def _repr_html_(self) -> str:
        title = f"{self.about.get('model', 'model')}{_images(self.about)}"
        lines = [f"edited: {edit}" for edit in self.about.get("edits", [])]
        lines += [f"note: {note}" for note in self.notes]
        from wellposed.report.heat_maps import charts_html

        return as_html(title, self._tables(), lines) + charts_html(self.records)

    def to_csv(self, path: str | Path) -> None:
        """One line a record, without the values of the single images."""
        write_csv(self.records, path)

    def to_json(self, path: str | Path | None = None) -> str:
        """Everything as JSON, which :meth:`from_json` reads; written to a file too if ``path`` names one."""
        if path is not None:
            write_json(self.records, self.about, path)
        return json_text(self.records, self.about)

    def to_html(self, path: str | Path | None = None) -> str:
        """The report as a page that opens offline; written to a file too if ``path`` names one."""
        from wellposed.report.page import diagnosis_page, write

        page = diagnosis_page(self.records, self.about)
        if path is not None:
            write(page, path)
        return page

    def to_pandas(self) -> Any:
        """A DataFrame with a row for each record, as :meth:`to_csv` writes them; it needs pandas.

        >>> import timm, torch, wellposed as wp
        >>> diagnosis = wp.diagnose(timm.create_model("vit_tiny_patch16_224", depth=1), what="weights")
        >>> frame = diagnosis.to_pandas()
        >>> frame[frame.measure == "weight kappa"].position.tolist()
        ['attn.qkv q', 'attn.qkv k', 'attn.qkv v', 'attn.proj', 'mlp.fc1', 'mlp.fc2']
        """
        try:
            import pandas  # type: ignore[import-untyped]
        except ImportError as error:
            raise ImportError(
                "expected pandas for to_pandas(), which is missing: pip install 'wellposed[pandas]', or use "
                "to_csv()."
            ) from error
        return pandas.DataFrame(rows(self.records), columns=list(COLUMNS))

    def save_attention(self, path: str | Path, *, block: int | None = None, head: int | None = None) -> None:
        """A figure of where attention looks, of ``what="attention"``; it needs matplotlib.

        Args:
            path: of the file, its ending says which kind: PNG, SVG, PDF.
            block: whose attention; None for rollout through all blocks.
            head: one of the block's; None for the mean over them.
        """
        from wellposed.report.attention import save_attention

        save_attention(self.records, path, block=block, head=head)

    def save(self, folder: str | Path) -> None:
        """``diagnosis.csv``, ``.json`` and ``.html`` in a folder, which is made if needed."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.to_csv(folder / "diagnosis.csv")
        self.to_json(folder / "diagnosis.json")
        self.to_html(folder / "diagnosis.html")

    @classmethod
    def from_json(cls, path: str | Path) -> "Diagnosis":
        records, about = read_json(path)
        return cls(tuple(records), about)

    def compare(
        self,
        other: "Diagnosis",
        names: tuple[str, str] = ("this", "other"),
        *,
        measure: str | Sequence[str] | None = None,
        block: int | Sequence[int] | None = None,
        position: str | Sequence[str] | None = None,
    ) -> "Comparison":
        """The two side by side, the largest change first.

        A position whose tokens are those of one before it (a skip, the input of the next block) is skipped.

        Args:
            other: of the same measures.
            names: of the two, for the table.
            measure, block, position: of the records; one or several, None for all.
        """
        if not isinstance(other, Diagnosis):
            raise TypeError(f"expected a Diagnosis to compare with, got {type(other).__name__}.")
        theirs = {record.key: record for record in other.records}
        wanted = {"measure": _several(measure), "block": _several(block), "position": _several(position)}
        pairs = [
            (record, theirs[record.key])
            for record in self.records
            if record.key in theirs
            and all(values is None or getattr(record, name) in values for name, values in wanted.items())
        ]
        if not pairs and any(values is not None for values in wanted.values()):
            asked = ", ".join(f"{name}={values}" for name, values in wanted.items() if values is not None)
            raise ValueError(
                f"the two diagnoses share nothing with {asked}; their measures are "
                f"{_measures(self.records)} and {_measures(other.records)}."
            )
        if not pairs:
            raise ValueError(
                "the two diagnoses share no quantity: expected the same measures (what=) at the same "
                f"blocks, got {_measures(self.records)} and {_measures(other.records)}."
            )
        return Comparison(tuple(most_changed_first(without_repeats(pairs))), names)


@dataclass(frozen=True, repr=False)
class Comparison:
    """Quantities that two diagnoses share, in pairs.

    Args:
        pairs: a record of each, the largest change first.
        names: of the two.

    >>> from wellposed.records import Record
    >>> before, after = (Diagnosis((Record(measure="kappa", value=value, block=0),)) for value in (8.0, 2.0))
    >>> print(before.compare(after, ("before", "after")))
    measure  where    before  after  ratio
    kappa    block 0       8      2   0.25
    the largest change first
    """

    pairs: tuple[tuple[Record, Record], ...]
    names: tuple[str, str]

    def __str__(self) -> str:
        return as_text(pair_table(self.pairs, self.names))

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return as_html(" and ".join(self.names), [pair_table(self.pairs, self.names)], [])


def _several(wanted: Any) -> list[Any] | None:
    return None if wanted is None else list(wanted) if isinstance(wanted, (list, tuple, range)) else [wanted]


def _images(about: dict[str, Any]) -> str:
    count = about.get("images")
    return "" if not count else f": {count} image{'s' if count != 1 else ''}"


def _measures(records: Iterable[Record]) -> str:
    return ", ".join(dict.fromkeys(record.measure for record in records)) or "nothing"
