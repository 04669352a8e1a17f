"""Studies from their grids to their reports: recipes, runs, measurements, files.

Runs stand in one folder for all studies, named by what decides their result, so that none is trained twice.
The folder of a study has ``recipes/``, ``records.jsonl``, ``table.csv``, ``figure.png`` and ``summary.json``.
The same call again goes on where it stopped, and further seeds and data sets add to what is there.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from wellposed.study import ledger
from wellposed.study.choosing import broken_runs
from wellposed.study.files import about, read_summary, write_details, write_report
from wellposed.study.measuring import Measurer
from wellposed.study.plan import Scale, Study, StudyRecords, StudyReport, data_name
from wellposed.study.session import Session
from wellposed.train.sweep import COMMAND, GPU_JOBS, failures, gpu_is_there, train_runs
from wellposed.train.sweep.plan import Run

CPU_JOBS = 8
LARGE = 224
"""Models for images of this side fill a GPU alone."""


@dataclass(frozen=True)
class Outcome:
    """What a study came to; no report if it was stopped before its runs had ended."""

    folder: Path
    report: StudyReport | None
    exit_code: int


def run(study: Study, *, out: str | Path | None = None, **options: Any) -> Outcome:
    """Run one study, or go on with it; ``out`` is its own folder. Options as of :func:`run_all`."""
    return run_all([study], out=out, **options)[0]


def run_all(
    studies: Sequence[Study],
    *,
    data: Sequence[str] = ("digits",),
    scale: Scale = "small",
    seeds: Sequence[int] | None = None,
    out: str | Path | None = None,
    runs: str | Path | None = None,
    jobs: int | None = None,
    changes: Mapping[str, Any] | None = None,
    command: Sequence[str] = COMMAND,
    console: Console | None = None,
) -> list[Outcome]:
    """Run studies together, or go on with them: what they share is trained once.

    Args:
        studies: which.
        data: sets as ``Recipe.data`` has them; each variant is trained on each.
        scale: see :data:`wellposed.study.plan.Scale`.
        seeds: None takes each study's own.
        out: the folder of one study, the parent of several; see :func:`folders`.
        runs: the folder of all runs; None is ``runs`` in ``out``, or beside the studies' default folders.
        jobs: runs beside each other. None: 6 on a GPU, 1 where a model is large, else one a core.
        changes: fields of all the recipes, over what the studies say.
        command: what trains a recipe.
        console: where to print.
    """
    console = console or Console()
    at, pool = folders([study.name for study in studies], scale, out, runs)
    _check(data, seeds, changes or {})
    sessions = [
        Session(
            study,
            scale,
            data=data,
            seeds=study.seeds if seeds is None else seeds,
            folder=folder,
            pool=pool,
            changes=changes or {},
        )
        for study, folder in zip(studies, at, strict=True)
    ]
    for session in sessions:
        session.check()
    for session in sessions:
        for sentence in _dropping(session):
            _say(console, sentence)
        session.drop_stale()
    with Measurer(console) as measurer:
        code = _train(sessions, pool, jobs, command, console, measurer)
        if code >= 128:
            for session in sessions:
                if session.has_worked:
                    write_details(session)
            _say(console, "The study was stopped; the same command again goes on with it.")
            return [Outcome(session.folder, None, code) for session in sessions]
        measurer.wait()
    for session in sessions:
        _measure_once(session, console)
    return [_report(session, console, failed=bool(measurer.failed)) for session in sessions]


def report_again(
    studies: Sequence[Study],
    *,
    scale: Scale = "small",
    out: str | Path | None = None,
    console: Console | None = None,
) -> list[Outcome]:
    """Tables, figures and summaries from ``records.jsonl`` alone; nothing is trained or measured."""
    console = console or Console()
    at, pool = folders([study.name for study in studies], scale, out, None)
    outcomes = []
    for study, folder in zip(studies, at, strict=True):
        if not (folder / ledger.RECORDS).is_file():
            raise FileNotFoundError(
                f"expected {ledger.RECORDS} in {folder}, there is none; run the study first, or say --out."
            )
        before = read_summary(folder)
        session = Session(
            study,
            before.get("scale", scale),
            data=(),
            seeds=(),
            folder=folder,
            pool=pool,
            changes=before.get("changes", {}),
        )
        for reason, count in session.dropped.items():
            _say(console, f"{study.name}: {_records(count)} of {reason}; reported as they stand there.")
        outcomes.append(_report(session, console))
    return outcomes


def folders(
    names: Sequence[str], scale: Scale, out: str | Path | None, runs: str | Path | None
) -> tuple[list[Path], Path]:
    """The folder of each study, and that of all runs.

    >>> at, runs = folders(["both"], "small", None, None)
    >>> [path.as_posix() for path in (*at, runs)]
    ['runs/study/both-small', 'runs/study/runs']
    """
    if len(names) == 1 and out is not None:
        at, parent = [Path(out)], Path(out)
    else:
        parent = Path("runs") / "study" if out is None else Path(out)
        at = [parent / f"{name}-{scale}" for name in names]
    return at, parent / "runs" if runs is None else Path(runs)


def _check(data: Sequence[str], seeds: Sequence[int] | None, changes: Mapping[str, Any]) -> None:
    for name, option in {"data": "--data", "seed": "--seeds"}.items():
        if name in changes:
            raise ValueError(
                f"expected changes of what all runs share, got {name}={changes[name]}, which tells them "
                f"apart; say {option}."
            )
    names = [data_name(spec) for spec in data]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"data must be different sets, got {', '.join(data) or 'none'}.")
    if seeds is not None and (not seeds or len(set(seeds)) < len(seeds)):
        raise ValueError(f"seeds must be different numbers, got {list(seeds)}.")


def _train(
    sessions: Sequence[Session],
    pool: Path,
    jobs: int | None,
    command: Sequence[str],
    console: Console,
    measurer: Measurer,
) -> int:
    """All runs of all studies, each as soon as nothing stands before it; the exit code if it was stopped."""
    queued: set[str] = set()

    def ready() -> list[Run]:
        """Those that are needed and not in the queue; a study may also come to need one that has ended."""
        needed = [planned for session in sessions for planned in session.ready()]
        made = {each.folder.name: each for each in needed if each.folder.name not in queued}
        queued.update(made)
        return [Run(name, name, each.recipe, each.folder, each.title) for name, each in made.items()]

    def ended(run: Run) -> list[Run]:
        queued.discard(run.name)
        for session in sessions:
            session.ended(run.name)
            measurer.ask(session)
        return ready()

    for session in sessions:
        measurer.ask(session)
    first = ready()
    if not first:
        return 0
    children, code = train_runs(
        first,
        out=pool,
        jobs=_jobs(jobs, sessions, first),
        command=command,
        console=console,
        ended=ended,
    )
    for sentence in failures(children):
        _say(console, sentence)
    return code if code >= 128 else 0


def _jobs(asked: int | None, sessions: Sequence[Session], runs: Sequence[Run]) -> int:
    own = [session.study.jobs for session in sessions if session.study.jobs is not None]
    if asked is not None or own:
        return min(own) if asked is None else asked
    if any((each.recipe.image_size or 0) >= LARGE for each in runs):
        return 1
    # Models so small that a CPU trains them gain nothing from a second thread.
    return GPU_JOBS if gpu_is_there(os.environ) else min(CPU_JOBS, os.cpu_count() or 1)


def _measure_once(session: Session, console: Console) -> None:
    once = session.study.once
    if once is None:
        return
    if session.measured:
        _say(console, f"{session.study.name}: measured before; delete {session.folder} to measure again.")
        return
    session.folder.mkdir(parents=True, exist_ok=True)
    session.measured = once(session.scale, session.folder)
    session.has_worked = True


def _report(session: Session, console: Console, failed: bool = False) -> Outcome:
    records = session.records()
    report = session.study.report(records)
    report = dataclasses.replace(report, notes=[*report.notes, *broken_runs(records)])
    ledger.write(session.folder, records.runs, records.measured, session.strange)
    details = about(session, records, read_summary(session.folder))
    _say(console, f"\n{session.study.name}: {session.study.title}\n")
    for sentence in [*write_report(session.folder, records, report, details), *_unscored(records)]:
        _say(console, sentence)
    is_whole = not failed and all(run.state != "failed" for run in records.runs)
    return Outcome(session.folder, report, 0 if is_whole else 1)


def _unscored(records: StudyRecords) -> list[str]:
    """Sentences on the runs that no accuracy is known of, though they were tested."""
    return [
        f"{run.label}, {run.data}, seed {run.seed}: its test has scores that are not finite; it is left out."
        for run in records.runs
        if run.accuracy is None and "accuracy" in (run.result.get("test") or {}) and run.state == "finished"
    ]


def _dropping(session: Session) -> list[str]:
    """Sentences on the records of before that do not count any more."""
    told = [
        f"{session.study.name}: {_records(count)} of {reason} dropped."
        for reason, count in session.dropped.items()
    ]
    return [*told, f"The dropped ones are in {session.folder / ledger.DROPPED}."] if told else []


def _records(count: int) -> str:
    return "1 record" if count == 1 else f"{count} records"


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
