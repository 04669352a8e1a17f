"""The runs that a study can have: its cells with data sets and seeds as recipes with names."""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wellposed.study.choosing import Planned, variants
from wellposed.study.ledger import Key
from wellposed.study.plan import Cell, RunRecord, Scale, Study
from wellposed.study.pool import run_name
from wellposed.train.recipe import Recipe, combine


@dataclass(eq=False)
class Grid:
    """A study's runs, made when they are asked for.

    Args:
        study: whose.
        scale: of it.
        pool: the folder of all runs.
        changes: fields of all the recipes, over what the study says.
    """

    study: Study
    scale: Scale
    pool: Path
    changes: Mapping[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def variants(self) -> dict[str, list[Cell]]:
        found = variants(self.study.cells(self.scale), self.changes)
        for cells in found.values():
            for cell in cells:
                if cell.starts_from is not None and cell.starts_from not in found:
                    raise ValueError(
                        f"{cell.label} starts from {cell.starts_from!r}, which is no cell of the study."
                    )
        return found

    def has_trial(self, data: str) -> bool:
        return bool(self.study.trial_fields(self.scale, data))

    @functools.cache  # noqa: B019  # a grid lives as long as the call that made it
    def plan(
        self, label: str, number: int, data: str, seed: int, trial: bool, source: Path | None = None
    ) -> Planned:
        """The run of a variant's cell with that number; ``source`` is the folder that it starts from."""
        cell = self.variants[label][number]
        base = self.study.base(self.scale, data).to_mapping() | {"data": data}
        layers: list[Mapping[str, Any]] = [{**cell.fields, "seed": seed}, self.changes]
        if trial:
            layers.insert(1, self.study.trial_fields(self.scale, data))
        if source is not None:
            layers.append({"start_from": str(source)})
        recipe: Recipe = combine(base, {})
        for layer in layers:
            recipe = combine(recipe.to_mapping(), layer)
        is_measured = self.study.after is not None and cell.reported and not trial
        return Planned(cell, data, seed, trial, recipe, self.pool / run_name(recipe), is_measured)

    @functools.cache  # noqa: B019
    def keys(self, data: str, seed: int) -> dict[Key, tuple[int, Cell]]:
        """All runs that the study may have on a data set with a seed, and their places in the tables."""
        found: dict[Key, tuple[int, Cell]] = {}
        place = 0
        for label, cells in self.variants.items():
            for number, cell in enumerate(cells):
                place += 1
                for planned in self._possible(label, number, data, seed):
                    found[planned.key] = (place, cell)
        return found

    def _possible(self, label: str, number: int, data: str, seed: int) -> Iterator[Planned]:
        cell = self.variants[label][number]
        sources: list[Path | None] = [None]
        if cell.starts_from is not None:
            of_source = range(len(self.variants[cell.starts_from]))
            sources = [self.plan(cell.starts_from, each, data, seed, False).folder for each in of_source]
        for source in sources:
            yield self.plan(label, number, data, seed, False, source)
            if self.has_trial(data) and len(self.variants[label]) > 1:
                yield self.plan(label, number, data, seed, True, source)

    def require_different(self, data: str, seed: int) -> None:
        """A change over all must not make two variants the same."""
        seen: dict[str, str] = {}
        for label, cells in self.variants.items():
            for number in range(len(cells)):
                for planned in self._possible(label, number, data, seed):
                    other = seen.setdefault(planned.folder.name, label)
                    if other != label:
                        raise ValueError(
                            f"with these changes {other!r} and {label!r} would be the same run; "
                            "leave out of --set what the study varies."
                        )

    def stale(self, record: RunRecord) -> str:
        """Why a record is none of the study's runs any more; empty if it is one."""
        if record.label not in self.variants:
            return "variants that the study does not have"
        keys = self.keys(record.data, record.seed)
        if (record.run, record.trial) in keys:
            return ""
        now = next(
            (
                self.plan(record.label, number, record.data, record.seed, record.trial)
                for number, cell in enumerate(self.variants[record.label])
                if {name: record.recipe.get(name) for name in cell.chosen} == dict(cell.chosen)
            ),
            None,
        )
        if now is None:
            return "another choice of values"
        wanted = now.recipe.to_mapping()
        changed = [
            name
            for name, value in wanted.items()
            # These are not as they were asked for: names for folders, and what was open.
            if name not in ("data", "start_from", "trackers")
            and (name, value) != ("placement", "auto")
            and record.recipe.get(name) != value
        ]
        return f"another recipe ({', '.join(changed)})" if changed else "another recipe"
