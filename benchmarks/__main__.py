"""``python -m benchmarks NAME``: measure speed and accuracy again; without a name, what there is."""

import importlib
import sys

import typer

from wellposed.text import aligned, nearest

NAMES = {
    "graying": ("graying", "main", "what graying and broadcasting cost, in a training step and alone"),
    "diagnose": ("costs", "diagnose", "what the measurements cost, compared with the plain way"),
    "unused-edits": ("costs", "unused_edits", "what an edited model costs with nothing removed"),
    "edits": ("costs", "edits", "what each edit and the monitor add to a training step"),
    "side-by-side": ("training", "side_by_side", "several runs at once on one GPU, compared with one alone"),
    "time-to-start": ("training", "time_to_start", "how soon a compiled run trains"),
    "attention-kernels": ("training", "attention_kernels", "gradients under each kernel of attention"),
    "spectral": ("accuracy", "spectral", "spectral graying compared with a float64 SVD"),
    "peers": ("peers", "main", "measurements on a CPU, compared with the plain way"),
    "largest": ("accuracy", "largest", "the largest singular value where none stands out"),
    "hopper": ("hopper", "main", "the kernels for Hopper GPUs: accuracy and time"),
    "versions": ("versions", "main", "graying compared with another version of wellposed, in turns"),
    "kappa-picture": ("pictures", "kappa", "the picture of the README"),
    "jacobian-picture": ("pictures", "jacobian", "an attention Jacobian under graying"),
    "idea-pictures": ("pictures", "ideas", "the pictures of docs/ideas.md"),
    "bounds-table": ("pictures", "bounds_of_digits", "where the bounds hold, and by what margin"),
}
"""Module, function, and what it is; each is imported when it is called for."""


def app_of(name: str) -> typer.Typer:
    """The command of a benchmark."""
    if name not in NAMES:
        raise ValueError(f"benchmarks are {', '.join(NAMES)}, got {name!r}{nearest(name, NAMES)}")
    module, function, _ = NAMES[name]
    app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)
    app.command(name)(getattr(importlib.import_module(f"benchmarks.{module}"), function))
    return app


def main(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("--help", "-h"):
        typer.echo(aligned([("benchmark", "what"), *((name, what) for name, (_, _, what) in NAMES.items())]))
        typer.echo("\npython -m benchmarks NAME --help has the options of one.")
        return
    try:
        app = app_of(arguments[0])
    except ValueError as error:
        typer.secho(f"error: {error}", err=True, fg=typer.colors.RED)
        raise SystemExit(1) from error
    app(arguments[1:], prog_name=f"python -m benchmarks {arguments[0]}")


if __name__ == "__main__":
    main(sys.argv[1:])
