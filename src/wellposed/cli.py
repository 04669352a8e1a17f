"""The command line: one command, one call. Heavy imports wait until a command needs them."""

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from wellposed.text import indices
from wellposed.train import options
from wellposed.train.recipe_file import combine, read_recipe, recipe_text

app = typer.Typer(
    help="Measure how ill-conditioned a vision transformer is, and mend it.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


@app.command()
def demo(
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training images.")] = 25,
    seed: Annotated[
        int, typer.Option(min=0, help="Of the split, the weights and the order of the images.")
    ] = 0,
    out: Annotated[
        Path, typer.Option(help="Folder for report.html, the runs and the table's numbers.")
    ] = Path("demo"),
) -> None:
    """Train a small ViT on handwritten digits with and without its skips and edits: a table and a page.

    Interrupted, it goes on when called again; after it has finished, it starts anew.
    Exit code: 0 done, 1 a run failed, 130 or 143 stopped by SIGINT or SIGTERM.
    """
    with _plain_errors():
        from wellposed import demo as demonstration

        outcome = demonstration.run(out, epochs=epochs, seed=seed)
    raise typer.Exit(outcome.exit_code)


@app.command()
def diagnose(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_RUN", help="A timm name, hf:NAME_OR_FOLDER, tv:NAME, or the folder of a run."
        ),
    ],
    images: Annotated[
        Path | None,
        typer.Option(help=r"A folder of images, or one image. \[default: test images of the run's data]"),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="BEST|LAST|FILE",
            help=r"Of a run: best or last; of a model: a .safetensors file. \[default: best; random]",
        ),
    ] = None,
    pretrained: Annotated[bool, typer.Option(help="Download the library's own weights.")] = False,
    what: Annotated[
        str | None,
        typer.Option(
            help="conditioning, density, bounds, jacobian, ntk, some of them with commas, or all. "
            r"\[default: the first two]"
        ),
    ] = None,
    blocks: Annotated[
        str | None, typer.Option(help=r"Indices such as 0,3,11 or 0-5. \[default: all]")
    ] = None,
    max_images: Annotated[int | None, typer.Option(min=1, help=r"\[default: 32]")] = None,
    batch_size: Annotated[int, typer.Option(min=1)] = 16,
    image_size: Annotated[
        int | None, typer.Option(min=1, help="Side of the model's images, if not its own.")
    ] = None,
    model_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="For the model's library, such as num_classes=10 or patch_size=4; may be repeated.",
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help=r"cpu, cuda, ... \[default: a GPU if there is one]")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for diagnosis.csv, .json and .html.")] = None,
    seed: Annotated[int | None, typer.Option(help=r"Of random weights. \[default: 0]")] = None,
) -> None:
    """Measure how ill-conditioned a model or a training run is, and print the worst blocks first."""
    with _plain_errors():
        import torch

        import wellposed
        from wellposed import diagnosing
        from wellposed.train.environment import environment

        kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if diagnosing.is_folder(model):
            by_name = {"--pretrained": pretrained or None, "--image-size": image_size}
            _refuse_for_a_run(by_name | {"--model-option": model_option or None, "--seed": seed})
            target = diagnosing.trained_model(model, images, weights=weights, count=max_images, device=kind)
        else:
            target = diagnosing.named_model(
                model,
                images,
                weights=weights,
                pretrained=pretrained,
                image_size=image_size,
                options=options.model_options(model_option or ()),
                seed=seed or 0,
                device=kind,
            )
        measures: Any = [name.strip() for name in what.split(",")] if what and what != "all" else what
        diagnosis = wellposed.diagnose(
            target.model,
            target.images,
            what=measures,
            blocks=None if blocks is None else indices(blocks),
            max_images=max_images,
            batch_size=batch_size,
        )
        diagnosis.about.update({**target.about, "environment": environment()})
        diagnosis.notes.extend([*target.notes, target.about["weights"]])
        typer.echo(str(diagnosis))
        if out is not None:
            diagnosis.save(out)
            typer.echo(f"\nwritten to {out}: diagnosis.csv, diagnosis.json, diagnosis.html")


def _refuse_for_a_run(given: dict[str, Any]) -> None:
    for option, value in given.items():
        if value is not None:
            raise ValueError(
                f"{option} is for models by name; a run's model is as its recipe says, leave {option} out."
            )


@app.command()
@options.recipe_options()
def train(
    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="[RECIPE]", help="A .toml or .yaml file; the options go over what it says."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; one that holds an interrupted run goes on.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete what is in --out first.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the whole recipe as TOML and train nothing.")
    ] = False,
    *,
    flags: dict[str, Any],
) -> None:
    """Train a model, with or without edits. Without any option: a small ViT on handwritten digits.

    Exit code: 0 finished, 143 stopped by SIGTERM (run again to go on), 3 not finite, 1 error.
    """
    with _plain_errors():
        made = combine({} if recipe is None else read_recipe(recipe), options.values(flags))
        if dry_run:
            typer.echo(recipe_text(made), nl=False)
            return
        from wellposed.train import fit
        from wellposed.train.launching import leave_processes

        result = fit(made, out=out, overwrite=overwrite)
        leave_processes()
    raise typer.Exit(_EXIT_CODES[result.status])


_EXIT_CODES = {"finished": 0, "nonfinite": 3, "terminated": 143}


@app.command()
def sweep(
    recipes: Annotated[list[Path], typer.Argument(help="Recipes, or folders of them.")],
    jobs: Annotated[
        int | None, typer.Option(min=1, help=r"Runs beside each other. \[default: 6 on a GPU, else 1]")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder with a folder for each run.")] = Path("runs/sweep"),
    seeds: Annotated[
        str | None, typer.Option(help="Each recipe with each of these, such as 0,1,2 or 0-4.")
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="For all recipes, such as data=cifar10:DIR."),
    ] = None,
) -> None:
    """Train several recipes beside each other, and compare them.

    Run again, it goes on where it stopped.
    Exit code: 0 all finished, 1 one failed, 130 or 143 stopped by SIGINT or SIGTERM.
    """
    with _plain_errors():
        from wellposed.train.sweep import run

        outcome = run(
            recipes,
            out=out,
            jobs=jobs,
            seeds=None if seeds is None else indices(seeds, "seeds"),
            changes=options.assignments(change or ()),
        )
    raise typer.Exit(outcome.exit_code)


@app.command()
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
    seeds: Annotated[str | None, typer.Option(help=r"Such as 0,1,2 or 0-4. \[default: the study's]")] = None,
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
    with _plain_errors():
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
                seeds=None if seeds is None else indices(seeds, "seeds"),
                out=out,
                runs=runs,
                jobs=jobs,
                changes=options.assignments(change or ()),
                command=COMMAND if launch is None else (*shlex.split(launch), "-m", "wellposed", "train"),
            )
    raise typer.Exit(max(outcome.exit_code for outcome in outcomes))


@app.command()
def report(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_OR_DIAGNOSIS...",
            help="Folders of runs, sweeps, studies and diagnoses, or diagnosis.json files.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("report.html"),
    static: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write the figures as PNG and SVG here, instead of a page."),
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(help=r"A folder of images to show graying on. \[default: the run's own, or digits]"),
    ] = None,
) -> None:
    """Make one page of runs and diagnoses, which opens offline: what is worst, what changed, what to try."""
    with _plain_errors():
        from wellposed.report import read_material, report_page
        from wellposed.report.page import write

        material = read_material(paths)
        if static is not None:
            from wellposed.report.static import write_static

            written = write_static(material, static, images=images)
            typer.echo(f"written to {static}: {', '.join(path.name for path in written)}")
            return
        write(report_page(material, images=images), out)
        count = len(material.subjects)
        what = f"{count} runs and diagnoses" if count > 1 else f"the {material.subjects[0].kind}"
        typer.echo(f"{what} written to {out} ({out.stat().st_size / 1e6:.1f} MB); open it in a browser.")


@app.command()
def pack(
    source: Annotated[str, typer.Argument(help="Data as for train: a folder, cifar10:DIR, hf:NAME, ...")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The .npz file to write.")],
    skip_unreadable: Annotated[
        bool, typer.Option("--skip-unreadable", help="Leave out images that cannot be read.")
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
    with _plain_errors():
        from wellposed.train.data import pack as pack_images

        data = pack_images(
            source, out, quality=quality, holdout=holdout, seed=seed, skip_unreadable=skip_unreadable
        )
        for note in data.notes:
            typer.echo(note)
        counts = f"{len(data.train)} training and {len(data.test)} test images of {len(data.classes)} classes"
        typer.echo(f"{counts} written to {out}; train with --data packed:{out}")


bench = typer.Typer(help="Measure speed.", no_args_is_help=True)
app.add_typer(bench, name="bench")

_BY_DEVICE = r"\[default: on a GPU "
"""Elsewhere the benchmark takes what is done in a minute."""

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
    with _plain_errors():
        made = combine({}, options.values(flags))
        from wellposed.train.bench import run

        result = run(made, updates=updates)
        typer.echo(result.table())
        if json_file is not None:
            json_file.write_text(json.dumps(result.to_mapping(), indent=1) + "\n", encoding="utf-8")


@bench.command("graying")
def bench_graying(
    what: Annotated[
        str, typer.Option(help="steps: what edits add to a training step; growth: graying alone.")
    ] = "steps,growth",
    model: Annotated[
        str | None, typer.Option(help=rf"Of timm, for steps. {_BY_DEVICE}vit_base_patch16_224]")
    ] = None,
    image_size: Annotated[int | None, typer.Option(min=1, help=r"\[default: 224]")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help=rf"Of a step. {_BY_DEVICE}256]")] = None,
    precision: Annotated[str | None, typer.Option(help=rf"fp32 or bf16. {_BY_DEVICE}bf16]")] = None,
    compile: Annotated[bool | None, typer.Option(help=r"Compile the steps. \[default: on a GPU]")] = None,
    edits: Annotated[
        str | None,
        typer.Option(
            help="Some, with commas, of spectral-pixels, spectral-embedding, dct-pixels, dct-embedding, cb, "
            r"cb_s, svd-pixels, svd-embedding. \[default: all but svd]"
        ),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help=rf"In which all steps take turns. {_BY_DEVICE}5]")
    ] = None,
    updates: Annotated[int | None, typer.Option(min=1, help=rf"In one round. {_BY_DEVICE}10]")] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Some of spectral, dct, svd-gesvda, eigh, svd for growth; NAME-compiled through "
            r"torch.compile. \[default: all]"
        ),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help=rf"Sizes for growth, at 768 channels. {_BY_DEVICE}64,...,4096]")
    ] = None,
    channels: Annotated[
        str | None, typer.Option(help=rf"Sizes for growth, at 196 tokens. {_BY_DEVICE}192,...,1280]")
    ] = None,
    batches: Annotated[
        str | None, typer.Option(help=rf"Sizes for growth, at 196 x 768. {_BY_DEVICE}1,...,256]")
    ] = None,
    limit: Annotated[
        float | None,
        typer.Option(help=rf"Seconds of a call after which larger sizes are skipped. {_BY_DEVICE}2]"),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help=r"cpu, cuda, ... \[default: a GPU if there is one]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights and tokens.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for graying-steps.csv, graying-growth.csv, .json, .png.")
    ] = None,
    saved: Annotated[
        Path | None,
        typer.Option("--from", metavar="DIR", help="Measure nothing; show and draw what --out wrote there."),
    ] = None,
) -> None:
    """What graying and broadcasting cost: in a training step, and how it grows with the size.

    Without a GPU the sizes are small, for an answer within a minute.
    """
    with _plain_errors():
        from wellposed.bench.graying import run, show_saved

        if saved is not None:
            show_saved(saved)
            return
        steps: dict[str, Any] = {
            "model": model,
            "image_size": image_size,
            "batch_size": batch_size,
            "precision": precision,
        }
        steps |= {"compile": compile, "edits": _parts(edits), "rounds": rounds, "updates": updates}
        sizes = {"tokens": _sizes(tokens), "channels": _sizes(channels), "batches": _sizes(batches)}
        growth = {"methods": _parts(methods), "limit": limit, **sizes}
        run(
            _parts(what) or (),
            device=device,
            steps_options={**steps, "seed": seed},
            growth_options={**growth, "seed": seed},
            out=out,
        )


def _parts(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(part.strip() for part in text.split(","))


def _sizes(text: str | None) -> list[int] | None:
    found = None if text is None else indices(text, "sizes")
    if found is not None and min(found) < 1:
        raise ValueError(f"sizes must be positive, got {text!r}; 64,196,576 are examples.")
    return found


@contextmanager
def _plain_errors() -> Iterator[None]:
    """A mistake of the user's is one message, not a traceback."""
    try:
        yield
    except Exception as error:
        if not _for_the_user(error):
            raise
        typer.secho(f"error: {error}", err=True, fg=typer.colors.RED)
        raise typer.Exit(1) from error


def _for_the_user(error: Exception) -> bool:
    """Errors of wrong input, and all classes of our own, whose messages say what to do."""
    ours = type(error).__module__.partition(".")[0] == "wellposed"
    return ours or isinstance(error, (ValueError, TypeError, IndexError, OSError, ImportError))
