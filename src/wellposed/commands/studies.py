"""``wellposed study``: where the studies are."""

import typer

from wellposed.commands.app import REPRODUCE, app

WHERE = """\
The studies of the papers' figures and tables are in wellposed's repository, not in the package: a folder each
in studies/, with its code, records, table, figure, and a README with the verdict on each claim.

In a clone of the repository:
  pip install -e '.[train,plot]'
  python -m studies                                   the list
  python -m studies density --data digits --seeds 0   one study, on images that come with the package

A study elsewhere: a folder with records.jsonl and summary.json is read by wellposed report DIR."""


@app.command(
    rich_help_panel=REPRODUCE,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def study(context: typer.Context) -> None:
    """Say where the studies of the papers are, and how to run them.

    Exit code: 0, or 2 if a study was named: it is run by python -m studies.
    """
    typer.echo(WHERE)
    if context.args:
        typer.echo(f"\nTo run what you asked for: python -m studies {' '.join(context.args)}")
        raise typer.Exit(2)
