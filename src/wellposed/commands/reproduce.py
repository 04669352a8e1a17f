"""``wellposed study`` and ``wellposed bench``: both are in the repository, and these say where."""

import typer

from wellposed.commands.app import REPRODUCE, app

STUDIES = """\
The studies of the papers' figures and tables are in wellposed's repository, not in the package: a folder each
in studies/, with its code, records, table, figure, and a README with the verdict on each claim.

In a clone of the repository:
  pip install -e '.[train,plot]'
  python -m studies                                   the list
  python -m studies density --data digits --seeds 0   one study, on images that come with the package

A study elsewhere: a folder with records.jsonl and summary.json is read by wellposed report DIR."""

BENCHMARKS = """\
What is timed is in wellposed's repository, not in the package: code in benchmarks/, figures in results/.

In a clone of the repository:
  pip install -e '.[train]'
  python -m benchmarks                                the list
  python -m benchmarks trainer                        a training step, compared with a bare one of timm"""

_ANYTHING = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(rich_help_panel=REPRODUCE, context_settings=_ANYTHING)
def study(context: typer.Context) -> None:
    """Say where the studies of the papers are, and how to run them.

    Exit code: 0, or 2 if a study was named: it is run by python -m studies.
    """
    _say(STUDIES, "python -m studies", context.args)


@app.command(rich_help_panel=REPRODUCE, context_settings=_ANYTHING)
def bench(context: typer.Context) -> None:
    """Say where the benchmarks are, and how to run them.

    Exit code: 0, or 2 if a benchmark was named: it is run by python -m benchmarks.
    """
    # `wellposed bench train` of earlier versions is called trainer there.
    _say(
        BENCHMARKS, "python -m benchmarks", ["trainer" if each == "train" else each for each in context.args]
    )


def _say(where: str, command: str, asked: list[str]) -> None:
    typer.echo(where)
    if asked:
        typer.echo(f"\nTo run what you asked for: {command} {' '.join(asked)}")
        raise typer.Exit(2)
