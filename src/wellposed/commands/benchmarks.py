"""``wellposed bench``."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from wellposed.commands import options
from wellposed.commands.app import REPRODUCE, app, plain_errors
from wellposed.files import write_text
from wellposed.train.recipe import combine

bench = typer.Typer(help="Measure speed.", no_args_is_help=True)
app.add_typer(bench, name="bench", rich_help_panel=REPRODUCE)

_BENCH_FIELDS = ("model", "image_size", "patch_size", "batch_size", "precision", "compile", "device")


@bench.command("train")
@options.recipe_options(_BENCH_FIELDS)
def bench_train(
    updates: Annotated[int, typer.Option(min=1, help="Updates in one round.")] = 50,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers here too.")
    ] = None,
    *,
    flags: dict[str, Any],
) -> None:
    """Images per second of training, and the ratio to a bare timm step."""
    with plain_errors():
        made = combine({}, options.values(flags))
        from wellposed.train.bench import run

        result = run(made, updates=updates)
        typer.echo(result.table())
        if json_file is not None:
            write_text(json_file, json.dumps(result.to_mapping(), indent=1) + "\n")


@bench.command("graying", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench_graying() -> None:
    """Is in the repository: python -m benchmarks graying."""
    with plain_errors():
        raise ValueError(
            "this benchmark is in the repository and not in the package; in a clone of it: "
            "python -m benchmarks graying, with the options as before."
        )
