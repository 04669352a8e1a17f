"""The application that the commands join, and how a mistake of the user's is told."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

app = typer.Typer(
    help="Measure how ill-conditioned a vision transformer is, and mend it.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


@contextmanager
def plain_errors() -> Iterator[None]:
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
