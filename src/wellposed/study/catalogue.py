"""The studies by name; each is imported when it is asked for."""

import importlib
from collections.abc import Iterable

from wellposed.study.plan import Study
from wellposed.text import nearest

MODULES = {
    "skip-ablation": "trained.skip_ablation",
    "skip-depth": "trained.skip_depth",
    "convmixer": "trained.convmixer",
    "eps-sweep": "trained.eps_sweep",
    "jacobian-spectrum": "measured.jacobian_spectrum",
    "bounds": "measured.bounds",
    "models": "trained.models",
    "mae": "trained.mae",
    "training-time": "measured.training_time",
    "context-broadcasting": "trained.context_broadcasting",
    "cb-position": "trained.cb_position",
    "density": "measured.density",
    "both": "trained.both",
}
"""In the order of the papers; each module has ``STUDY``."""


def get(name: str) -> Study:
    """The study of that name.

    >>> get("skip-ablatoin")
    Traceback (most recent call last):
    ValueError: there is no study 'skip-ablatoin'; did you mean 'skip-ablation'?
    """
    if name not in MODULES:
        raise ValueError(f"there is no study {name!r}{nearest(name, MODULES)}")
    study: Study = importlib.import_module(f"wellposed.study.{MODULES[name]}").STUDY
    return study


def expanded(names: Iterable[str]) -> list[str]:
    """The names, each once; ``all`` is every study.

    >>> expanded(["both", "mae", "both"]), len(expanded(["all"]))
    (['both', 'mae'], 13)
    """
    every = [name for given in names for name in (MODULES if given == "all" else [given])]
    return list(dict.fromkeys(every))


def listing() -> list[tuple[str, str, str]]:
    """Name, title and place in the papers of each; those that run on a laptop say so."""
    studies = [get(name) for name in MODULES]
    return [
        (study.name, study.title + (" (laptop: --data digits)" if study.on_cpu else ""), study.paper)
        for study in studies
    ]
