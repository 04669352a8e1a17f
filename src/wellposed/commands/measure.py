"""``wellposed demo``, ``diagnose`` and ``report``."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from wellposed.commands import options
from wellposed.commands.app import FIRST_STEPS, MEASURE, app, device_named, plain_errors
from wellposed.commands.options import numbers, parts


@app.command(rich_help_panel=FIRST_STEPS)
def demo(
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training images.")] = 12,
    seed: Annotated[
        int, typer.Option(min=0, help="The first one, of the split, the weights and the order of the images.")
    ] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each model.")] = 3,
    out: Annotated[
        Path, typer.Option(help="Folder for report.html, the runs and the table's numbers.")
    ] = Path("demo"),
) -> None:
    """Train a small ViT on handwritten digits with and without its skips and edits: a table and a page.

    Interrupted, it resumes when called again; after it has finished, it starts over.
    Exit code: 0 done, 1 a run failed, 130 or 143 stopped by SIGINT or SIGTERM.
    """
    with plain_errors():
        from wellposed import demo as demonstration

        outcome = demonstration.run(out, epochs=epochs, seed=seed, seeds=seeds)
    raise typer.Exit(outcome.exit_code)


@app.command(rich_help_panel=MEASURE)
def diagnose(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_RUN",
            help="A timm name, hf-hub:NAME, local-dir:FOLDER, hf:NAME_OR_FOLDER, tv:NAME, or a run's folder.",
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
            help=r"Of a run: best or last; of a model: a .safetensors or .pth file. \[default: best; random]",
        ),
    ] = None,
    pretrained: Annotated[bool, typer.Option(help="Download the library's own weights.")] = False,
    what: Annotated[
        list[str] | None,
        typer.Option(
            help="conditioning, density, bounds, jacobian, ntk, some of them with commas, or all. "
            r"\[default: the first two]"
        ),
    ] = None,
    blocks: Annotated[
        list[str] | None, typer.Option(help=r"Indices such as 0,3,11 or 0-5. \[default: all]")
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
    edit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="'EDIT ARGUMENT=VALUE ...'",
            help="Edit a model by name as training does, such as 'gray_tokens eps=0.7' or "
            "'remove_skips which=attention'; may be repeated.",
        ),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL_OR_RUN_OR_DIAGNOSIS",
            help="Measure this too, unedited, or read what --out has written, and print both side by side.",
        ),
    ] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print every record as JSON instead of tables.")
    ] = False,
) -> None:
    """Measure how ill-conditioned a model or a training run is, and print the worst blocks first."""
    with plain_errors():
        if json_output and compare is not None:
            raise ValueError("expected --json or --compare, got both; print the JSON of each on its own.")
        import wellposed
        from wellposed import targets
        from wellposed.environment import environment

        kind, measures = device_named(device), parts(what)
        by_name: dict[str, Any] = {
            "weights": weights,
            "pretrained": pretrained,
            "image_size": image_size,
            "options": options.model_options(model_option or ()),
            "seed": seed or 0,
        }

        def target_of(name: str, edits: dict[str, Any]) -> targets.Target:
            if not targets.is_folder(name):
                return targets.named_model(name, images, device=kind, edits=edits, **by_name)
            given = {"--pretrained": pretrained or None, "--image-size": image_size, "--seed": seed}
            _refuse_for_a_run(given | {"--model-option": model_option or None, "--edit": edits or None})
            return targets.trained_model(name, images, weights=weights, count=max_images, device=kind)

        def measured(target: targets.Target) -> wellposed.Diagnosis:
            diagnosis = wellposed.diagnose(
                target.model,
                target.images,
                what="all" if measures == ("all",) else cast(Any, measures),
                blocks=numbers(blocks, "blocks"),
                max_images=max_images,
                batch_size=batch_size,
                progress=True,
            )
            diagnosis.about.update({**target.about, "environment": environment()})
            diagnosis.notes.extend([*target.notes, target.about["weights"]])
            return diagnosis

        other = None
        if compare is not None:
            other = targets.kept_diagnosis(compare) or measured(target_of(compare, {}))
        diagnosis = measured(target_of(model, options.edits(edit or ())))
        typer.echo(diagnosis.to_json() if json_output else str(diagnosis), nl=not json_output)
        if other is not None:
            assert compare is not None
            typer.echo(f"\n{diagnosis.compare(other, (model, compare))}")
        if out is not None:
            diagnosis.save(out)
            typer.echo(
                err=json_output, message=f"\nwritten to {out}: diagnosis.csv, diagnosis.json, diagnosis.html"
            )


def _refuse_for_a_run(given: dict[str, Any]) -> None:
    for option, value in given.items():
        if value is not None:
            raise ValueError(
                f"{option} is for models by name; a run's model is as its recipe says, leave {option} out."
            )


@app.command(rich_help_panel=MEASURE)
def report(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_OR_DIAGNOSIS...",
            help="Folders of runs, sweeps, studies and diagnoses, or diagnosis.json files.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("report.html"),
    images: Annotated[
        Path | None,
        typer.Option(help=r"A folder of images to show graying on. \[default: those that the run has kept]"),
    ] = None,
) -> None:
    """Make one page of runs and diagnoses, which opens offline: what is worst, what changed, what to try."""
    with plain_errors():
        from wellposed.report import read_material, report_page
        from wellposed.report.page import write

        material = read_material(paths)
        if images is not None:
            from wellposed.probes.gray_images import gray_folder, settings_of

            settings = settings_of([subject.recipe for subject in material.subjects])
            material = replace(material, graying=gray_folder(images, **settings))
        for damage in material.damage:
            typer.secho(f"warning: {damage}", err=True, fg=typer.colors.YELLOW)
        write(report_page(material), out)
        count = len(material.subjects)
        what = f"{count} runs and diagnoses" if count > 1 else f"the {material.subjects[0].kind}"
        typer.echo(f"{what} written to {out} ({out.stat().st_size / 1e6:.1f} MB); open it in a browser.")
