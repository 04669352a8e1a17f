"""``wellposed train``, ``sweep``, ``pack`` and ``push``."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from wellposed.commands import options
from wellposed.commands.app import TRAIN, app, plain_errors
from wellposed.commands.options import numbers
from wellposed.train.recipe import combine, read_recipe, recipe_text

Engine = Literal["local", "ray"]
Weights = Literal["best", "last"]

_USUAL = ("data", "model", "pretrained", "edits", "epochs", "batch_size", "lr", "seed", "precision", "device")
"""The options that ``train --help`` shows; ``--help-all`` shows all."""


@app.command(rich_help_panel=TRAIN)
@options.recipe_options(shown=_USUAL)
def train(
    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="[RECIPE]", help="A .toml file; the options go over what it says."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; one that holds an interrupted run is resumed.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete what is in --out first.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the whole recipe as TOML and train nothing.")
    ] = False,
    *,
    flags: dict[str, Any],
) -> None:
    """Train a model, with or without edits. Without any option: a small ViT on handwritten digits.

    These are the options that most runs need; --help-all shows all of them.
    Exit code: 0 finished, 143 stopped by SIGTERM (run again to resume), 3 not finite, 1 error.
    """
    with plain_errors(has_file=recipe is not None):
        made = combine({} if recipe is None else read_recipe(recipe), options.values(flags))
        if dry_run:
            typer.echo(recipe_text(made), nl=False)
            return
        from wellposed.train import fit
        from wellposed.train.parallel import leave_processes

        result = fit(made, out=out, overwrite=overwrite)
        leave_processes()
    raise typer.Exit(_EXIT_CODES[result.status])


_EXIT_CODES = {"finished": 0, "nonfinite": 3, "terminated": 143}


@app.command(rich_help_panel=TRAIN)
def sweep(
    recipes: Annotated[list[Path], typer.Argument(help="Recipes, or folders of them.")],
    jobs: Annotated[
        int | None, typer.Option(min=1, help=r"Runs at a time. \[default: 6 on a GPU, else 1]")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder with a folder for each run.")] = Path("runs/sweep"),
    seeds: Annotated[
        list[str] | None, typer.Option(help="Each recipe with each of these, such as 0,1,2 or 0-4.")
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="For all recipes, such as data=cifar10:DIR."),
    ] = None,
    engine: Annotated[
        Engine, typer.Option(help="Processes on this machine, or tasks of a Ray cluster.")
    ] = "local",
    gpus_per_run: Annotated[
        float | None, typer.Option(help=r"Of the cluster, such as 0.25. \[default: 1 if it has GPUs]")
    ] = None,
    cpus_per_run: Annotated[float | None, typer.Option(help=r"Of the cluster. \[default: 1]")] = None,
    retries: Annotated[
        int | None, typer.Option(min=0, help=r"For a run whose node of the cluster dies. \[default: 3]")
    ] = None,
) -> None:
    """Train several recipes, some at a time, and compare them.

    Run again, it resumes where it stopped.
    Exit code: 0 all finished, 1 one failed, 130 or 143 stopped by SIGINT or SIGTERM.
    """
    with plain_errors(has_file=True):
        from wellposed.train.sweep import run

        outcome = run(
            recipes,
            out=out,
            jobs=jobs,
            seeds=numbers(seeds, "seeds"),
            changes=options.assignments(change or ()),
            **_cluster(engine, gpus=gpus_per_run, cpus=cpus_per_run, retries=retries),
        )
    raise typer.Exit(outcome.exit_code)


def _cluster(engine: Engine, **given: float | None) -> dict[str, Any]:
    """What the sweep needs of a cluster: nothing on this machine."""
    asked: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if engine == "ray":
        from wellposed.train.sweep.processes import Resources

        return {"cluster": Resources(**asked)}
    if asked:
        raise ValueError("--gpus-per-run, --cpus-per-run and --retries need --engine ray.")
    return {}


@app.command(rich_help_panel=TRAIN)
def pack(
    source: Annotated[str, typer.Argument(help="Data as for train: a folder, cifar10:DIR, hf:NAME, ...")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The .npz file to write.")],
    skip_unreadable: Annotated[
        bool, typer.Option("--skip-unreadable", help="Skip images that cannot be read.")
    ] = False,
    holdout: Annotated[
        float, typer.Option(help="Share of the images to test on, where the set has no test split.")
    ] = 0.1,
    seed: Annotated[int, typer.Option(min=0, help="Of that split.")] = 0,
    quality: Annotated[
        int | None,
        typer.Option(help=r"Of JPEG, for images that are no JPEG or PNG files. \[default: lossless]"),
    ] = None,
) -> None:
    """Decode a set of images into one file, for --data packed:FILE.npz."""
    with plain_errors():
        from wellposed.train.data.archives import pack as pack_images

        data = pack_images(
            source, out, quality=quality, holdout=holdout, seed=seed, skip_unreadable=skip_unreadable
        )
        for note in data.notes:
            typer.echo(note)
        counts = f"{len(data.train)} training and {len(data.test)} test images of {len(data.classes)} classes"
        typer.echo(f"{counts} written to {out}; train with --data packed:{out}")


@app.command(rich_help_panel=TRAIN)
def push(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    repo: Annotated[str, typer.Argument(metavar="USER/NAME", help="Of models on the Hugging Face Hub.")],
    weights: Annotated[Weights, typer.Option(help="Which of the run's.")] = "best",
    private: Annotated[
        bool, typer.Option("--private", help="Make a new repository that its owner alone can see.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the files that would be sent, and send nothing.")
    ] = False,
) -> None:
    """Share a run: its weights with their model card, its recipe and its numbers, in one commit.

    timm loads it as hf-hub:USER/NAME. The token is that of: hf auth login.
    """
    with plain_errors():
        from wellposed.train import export

        files = export.files_of(run, weights)
        for name, file in files.items():
            typer.echo(f"{name}  {file.stat().st_size:,} bytes")
        if not dry_run:
            typer.echo(f"shared as {export.push(run, repo, weights=weights, private=private)}")
