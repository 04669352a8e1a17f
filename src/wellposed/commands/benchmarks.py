"""``wellposed bench``."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from wellposed.commands.app import REPRODUCE, app, device_named, plain_errors
from wellposed.commands.lists import numbers, parts
from wellposed.files import write_text
from wellposed.train import options
from wellposed.train.recipe_file import combine

bench = typer.Typer(help="Measure speed.", no_args_is_help=True)
app.add_typer(bench, name="bench", rich_help_panel=REPRODUCE)

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
    with plain_errors():
        made = combine({}, options.values(flags))
        from wellposed.train.bench import run

        result = run(made, updates=updates)
        typer.echo(result.table())
        if json_file is not None:
            write_text(json_file, json.dumps(result.to_mapping(), indent=1) + "\n")


@bench.command("graying")
def bench_graying(
    what: Annotated[
        list[str] | None,
        typer.Option(
            help="steps: what edits add to a training step; growth: graying alone; peers: other ways to gray "
            r"on a CPU, in turns. \[default: steps, growth]"
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help=rf"Of timm, for steps. {_BY_DEVICE}vit_base_patch16_224]")
    ] = None,
    image_size: Annotated[int | None, typer.Option(min=1, help=r"\[default: 224]")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help=rf"Of a step. {_BY_DEVICE}256]")] = None,
    precision: Annotated[str | None, typer.Option(help=rf"fp32 or bf16. {_BY_DEVICE}bf16]")] = None,
    compile: Annotated[bool | None, typer.Option(help=r"Compile the steps. \[default: on a GPU]")] = None,
    edits: Annotated[
        list[str] | None,
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
        list[str] | None,
        typer.Option(
            help="Some of spectral, dct, svd-gesvda, eigh, svd for growth; NAME-compiled through "
            r"torch.compile. \[default: all]"
        ),
    ] = None,
    tokens: Annotated[
        list[str] | None, typer.Option(help=rf"Sizes for growth, at 768 channels. {_BY_DEVICE}64,...,4096]")
    ] = None,
    channels: Annotated[
        list[str] | None, typer.Option(help=rf"Sizes for growth, at 196 tokens. {_BY_DEVICE}192,...,1280]")
    ] = None,
    batches: Annotated[
        list[str] | None, typer.Option(help=rf"Sizes for growth, at 196 x 768. {_BY_DEVICE}1,...,256]")
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
    with plain_errors():
        from wellposed.bench.graying import USUAL_PARTS, run, show_saved

        if saved is not None:
            show_saved(saved)
            return
        steps: dict[str, Any] = {
            "model": model,
            "image_size": image_size,
            "batch_size": batch_size,
            "precision": precision,
        }
        steps |= {"compile": compile, "edits": parts(edits), "rounds": rounds, "updates": updates}
        sizes = {"tokens": _sizes(tokens), "channels": _sizes(channels), "batches": _sizes(batches)}
        growth = {"methods": parts(methods), "limit": limit, **sizes}
        run(
            parts(what) or USUAL_PARTS,
            device=None if device is None else device_named(device),
            steps_options={**steps, "seed": seed},
            growth_options={**growth, "seed": seed},
            out=out,
        )


def _sizes(given: list[str] | None) -> list[int] | None:
    found = numbers(given, "sizes")
    if found is not None and min(found) < 1:
        raise ValueError(f"sizes must be positive, got {min(found)}; 64,196,576 are examples.")
    return found
