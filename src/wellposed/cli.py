"""The command line: one command, one call. Heavy imports wait until a command needs them."""

from typing import Annotated

import typer

app = typer.Typer(
    help="Measure how ill-conditioned a vision transformer is, and mend it.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


@app.callback()
def main() -> None:
    """Keep 'demo' a subcommand while it is the only one."""


@app.command()
def demo(
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training images.")] = 20,
    seed: Annotated[int, typer.Option(help="Of the split, the weights and the order of the images.")] = 0,
) -> None:
    """Train a small ViT on handwritten digits with and without each edit, and show what changed."""
    from wellposed import demo as demonstration

    demonstration.run(epochs=epochs, seed=seed)
