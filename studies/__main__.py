"""``python -m studies NAME``: run a study, or make its tables, figure and verdicts again."""

import shlex
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.console import Console

from studies import report as reporting
from studies import runner
from studies.study import Records, folder_of, get, names
from wellposed import study_records
from wellposed.commands import options
from wellposed.commands.app import plain_errors
from wellposed.commands.options import numbers
from wellposed.study_records import RECORDS, sentence
from wellposed.text import aligned
from wellposed.train import sweep

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def studies(
    name: Annotated[list[str] | None, typer.Argument(help="Which, or all; none lists them.")] = None,
    scale: Annotated[str, typer.Option(help="small: minutes; paper: as the papers did it.")] = "small",
    data: Annotated[list[str] | None, typer.Option(help="As for train; may be repeated.")] = None,
    seeds: Annotated[list[str] | None, typer.Option(help="Such as 0,1,2 or 0-4.")] = None,
    change: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="For all runs: epochs=2.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Of the records; studies/NAME/SCALE without it.")] = None,
    runs: Annotated[Path, typer.Option(help="Folder of all runs, which studies share.")] = runner.RUNS,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time.")] = None,
    launch: Annotated[
        str | None, typer.Option(help="What starts a run: 'torchrun --nproc-per-node 8'.")
    ] = None,
    report_only: Annotated[bool, typer.Option("--report-only", help="From the records, no run.")] = False,
    draw: Annotated[bool, typer.Option(help="Draw the figure.")] = True,
) -> None:
    """Run figures and tables of the papers: their runs, tables, figures, and a verdict on each claim.

    The same command again resumes; further seeds and data sets add to the records. Exit code: 0 done, 1 a run
    failed, 130 or 143 stopped by SIGINT or SIGTERM.
    """
    console = Console()
    with plain_errors():
        if not name:
            console.print(listing(), markup=False, highlight=False, soft_wrap=True)
            return
        if scale not in ("small", "paper"):
            raise ValueError(f"scale must be small or paper, got {scale!r}.")
        chosen = names() if name == ["all"] else name
        if out is not None and len(chosen) > 1:
            raise ValueError("expected one study with --out, its own folder; call each with its own.")
        code = 0
        for each in chosen:
            study = get(each)
            folder = folder_of(each, cast(Any, scale)) if out is None else out
            changes = options.assignments(change or ())
            if report_only:
                outcome = runner.Outcome(kept(folder, cast(Any, scale)), 0, False)
                sets: list[str] = []
            else:
                sets = data or (["digits"] if study.variants(cast(Any, scale), "digits") else [])
                outcome = runner.run(
                    study,
                    scale=cast(Any, scale),
                    data=sets,
                    seeds=numbers(seeds, "seeds") or study.seeds,
                    out=folder,
                    pool=runs,
                    changes=changes,
                    jobs=jobs,
                    command=sweep.COMMAND
                    if launch is None
                    else (*shlex.split(launch), "-m", "wellposed", "train"),
                    console=console,
                )
            code = max(code, outcome.exit_code)
            if code >= 128:
                break
            found, claims = reporting.write_report(
                each.replace("_", "-"),
                study,
                outcome.records,
                folder,
                data=sets,
                changes=None if report_only else changes,
                has_worked=outcome.has_worked,
                draw=draw,
            )
            said = [
                reporting.text_table(found.tables["table"]),
                *(f"- {sentence(claim)}" for claim in claims),
            ]
            said += [f"note: {note}" for note in found.notes]
            said.append(f"{each}: {reporting.counted(claims)}; written to {folder}")
            console.print("\n".join(said), markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(code)


def kept(folder: Path, scale: Any) -> Records:
    """The records of a folder as they are."""
    if not (folder / RECORDS).is_file():
        raise FileNotFoundError(
            f"expected {RECORDS} in {folder}, there is none; run the study first, or say --out."
        )
    ledger = study_records.read(folder)
    if ledger.torn or ledger.strange:
        raise ValueError(
            f"expected records of this version in {folder / RECORDS}: {ledger.strange} are of another, and "
            f"lines {ledger.torn} are torn."
        )
    return Records(scale, ledger.runs, ledger.measured)


def listing() -> str:
    """The studies, with their titles and places in the papers."""
    rows = [("study", "what", "paper")]
    for each in names():
        study = get(each)
        rows.append((each, study.title + (" (minutes on a laptop)" if study.on_cpu else ""), study.paper))
    return aligned(rows)


if __name__ == "__main__":
    app()
