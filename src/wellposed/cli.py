"""The command line: one command, one call. Heavy imports wait until a command needs them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="Measure how ill-conditioned a vision transformer is, and mend it.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


@app.command()
def demo(
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training images.")] = 20,
    seed: Annotated[int, typer.Option(help="Of the split, the weights and the order of the images.")] = 0,
) -> None:
    """Train a small ViT on handwritten digits with and without each edit, and show what changed."""
    from wellposed import demo as demonstration

    demonstration.run(epochs=epochs, seed=seed)


@app.command()
def diagnose(
    model: Annotated[str, typer.Argument(help="A timm name, hf:NAME_OR_FOLDER or tv:NAME.")],
    images: Annotated[Path, typer.Option(help="A folder of images, or one image.")],
    weights: Annotated[Path | None, typer.Option(help="A .safetensors file for the model.")] = None,
    pretrained: Annotated[bool, typer.Option(help="Download the library's own weights.")] = False,
    what: Annotated[
        str | None,
        typer.Option(
            help="conditioning, density, bounds, jacobian, ntk, some of them with commas, or all. "
            "[default: the first two]"
        ),
    ] = None,
    blocks: Annotated[str | None, typer.Option(help="Indices such as 0,3,11 or 0-5. [default: all]")] = None,
    max_images: Annotated[int | None, typer.Option(min=1, help="[default: 32]")] = None,
    batch_size: Annotated[int, typer.Option(min=1)] = 16,
    image_size: Annotated[
        int | None, typer.Option(min=1, help="Side of the model's images, if not its own.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, ... [default: a GPU if there is one]")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for diagnosis.csv, .json and .html.")] = None,
    seed: Annotated[int, typer.Option(help="Of random weights.")] = 0,
) -> None:
    """Measure how ill-conditioned a model is on your images, and print the worst blocks first."""
    with _plain_errors():
        import torch

        import wellposed
        from wellposed.models import build, describe_weights

        kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
        options: dict[str, Any] = {} if image_size is None else {_size_option(model): image_size}
        built = build(model, weights=weights, pretrained=pretrained, seed=seed, **options).to(kind)
        measures: Any = [name.strip() for name in what.split(",")] if what and what != "all" else what
        diagnosis = wellposed.diagnose(
            built,
            images,
            what=measures,
            blocks=_indices(blocks),
            max_images=max_images,
            batch_size=batch_size,
        )
        diagnosis.about.update({"model": model, "weights": describe_weights(built)})
        diagnosis.notes.append(describe_weights(built))
        typer.echo(str(diagnosis))
        if out is not None:
            diagnosis.save(out)
            typer.echo(f"\nwritten to {out}: diagnosis.csv, diagnosis.json, diagnosis.html")


def _size_option(model: str) -> str:
    return "img_size" if ":" not in model else "image_size"


def _indices(text: str | None) -> list[int] | None:
    """Block indices of a text such as 0,3,8-11."""
    if text is None:
        return None
    indices: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ValueError(f"blocks must be indices such as 0,3,11 or 0-5, got {text!r}.")
        indices += range(int(first), int(last or first) + 1)
    return indices


@contextmanager
def _plain_errors() -> Iterator[None]:
    """A mistake of the user's is one message, not a traceback."""
    try:
        yield
    except (ValueError, TypeError, IndexError, OSError, ImportError) as error:
        typer.secho(f"error: {error}", err=True, fg=typer.colors.RED)
        raise typer.Exit(1) from error
