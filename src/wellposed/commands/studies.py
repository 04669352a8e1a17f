"""``wellposed study``."""

import shlex
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from wellposed.commands.app import REPRODUCE, app, plain_errors
from wellposed.commands.lists import numbers
from wellposed.train import options


@app.command(rich_help_panel=REPRODUCE)
def study(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Which, or all; without one, they are listed."),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="A set as for train; may be repeated, for a study on several sets."),
    ] = None,
    scale: Annotated[
        str, typer.Option(help="small: minutes on one GPU; paper: as the papers did it.")
    ] = "small",
    seeds: Annotated[
        list[str] | None, typer.Option(help=r"Such as 0,1,2 or 0-4. \[default: the study's]")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the study; of several, the folder of their folders NAME-SCALE. "
            r"\[default: runs/study/NAME-SCALE]"
        ),
    ] = None,
    runs: Annotated[
        Path | None,
        typer.Option(
            help=r"Folder of all runs, which studies share. \[default: OUT/runs, or runs/study/runs]"
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help=r"Runs beside each other. \[default: 6 on a GPU, else one a core]"),
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="For all runs, such as epochs=20."),
    ] = None,
    launch: Annotated[
        str | None,
        typer.Option(help="What starts each run, such as 'torchrun --nproc-per-node 8' for eight GPUs."),
    ] = None,
    report_only: Annotated[
        bool,
        typer.Option("--report-only", help="Tables, figure and summary from the records in OUT, no run."),
    ] = False,
) -> None:
    """Run figures or tables of the papers: their runs, tables and figures, and whether they hold.

    Run again, it goes on where it stopped; further seeds and data sets add to what is there.
    Exit code: 0 done, 1 a run failed, 130 or 143 stopped by SIGINT or SIGTERM.
    """
    with plain_errors():
        from wellposed.study import catalogue

        if not names:
            from wellposed.text import aligned

            typer.echo(aligned([("study", "what", "paper"), *catalogue.listing()]))
            return
        if scale not in ("small", "paper"):
            raise ValueError(f"scale must be small or paper, got {scale!r}.")
        from wellposed.study.running import report_again, run_all
        from wellposed.train.sweep import COMMAND

        studies = [catalogue.get(name) for name in catalogue.expanded(names)]
        if report_only:
            outcomes = report_again(studies, scale=cast(Any, scale), out=out)
        else:
            outcomes = run_all(
                studies,
                data=data or ["digits"],
                scale=cast(Any, scale),
                seeds=numbers(seeds, "seeds"),
                out=out,
                runs=runs,
                jobs=jobs,
                changes=options.assignments(change or ()),
                command=COMMAND if launch is None else (*shlex.split(launch), "-m", "wellposed", "train"),
            )
    raise typer.Exit(max(outcome.exit_code for outcome in outcomes))
