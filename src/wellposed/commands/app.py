"""The application that the commands join, and how a mistake of the user's is reported."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from typer.core import TyperGroup

FIRST_STEPS, MEASURE, TRAIN, REPRODUCE = "First steps", "Measure", "Train", "Reproduce"
_ORDER = ("demo", "doctor", "diagnose", "report", "train", "sweep", "pack", "push", "study", "bench")
"""Of the commands in ``--help``, which puts each group where its first command is."""


class _Ordered(TyperGroup):
    """Commands in the order in which a new user meets them."""

    def list_commands(self, context: typer.Context) -> list[str]:  # type: ignore[override]
        return sorted(super().list_commands(context), key=_ORDER.index)


app = typer.Typer(
    cls=_Ordered,
    help="Measure how ill-conditioned a vision transformer is, and fix it.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from wellposed import __version__

        typer.echo(f"wellposed {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    command = context.command.commands.get(context.invoked_subcommand)  # type: ignore[attr-defined]
    _FLAGS.clear()
    for each in (command, *getattr(command, "commands", {}).values()):
        _FLAGS.update({p.name: p.opts[0] for p in getattr(each, "params", ()) if p.opts[0].startswith("--")})


_FLAGS: dict[str, str] = {}
"""Of the command that runs, by the names of its arguments."""


@contextmanager
def plain_errors(*, has_file: bool = False) -> Iterator[None]:
    """A mistake of the user's is one message, not a traceback.

    ``has_file``: what is named may be a field of a file, and not a flag.
    """
    try:
        yield
    except Exception as error:
        if not _for_the_user(error):
            raise
        said = str(error) if has_file else in_flags(str(error), _FLAGS)
        typer.secho(f"error: {said}", err=True, fg=typer.colors.RED)
        raise typer.Exit(1) from error


def _for_the_user(error: Exception) -> bool:
    """Errors of wrong input, and all classes of our own, whose messages say what to do."""
    ours = type(error).__module__.partition(".")[0] == "wellposed"
    return ours or isinstance(error, (ValueError, TypeError, IndexError, OSError, ImportError))


def in_flags(message: str, flags: dict[str, str]) -> str:
    """Names of arguments as flags: those with a value behind them, and those that are no English word.

    What stands in a call, such as ``wp.gray_tokens(model, blocks=[0])``, is Python and stays.

    >>> in_flags("batch_size must be even, got weights=a; leave pretrained=True out.",
    ...          {"batch_size": "--batch-size", "weights": "--weights", "pretrained": "--pretrained"})
    '--batch-size must be even, got --weights a; leave --pretrained out.'
    """
    return "".join(
        part if _CALL.fullmatch(part) else _in_flags(part, flags) for part in re.split(_CALLS, message)
    )


_CALLS = r"((?<![\w.])[\w.]+\([^()]*\))"
_CALL = re.compile(_CALLS)


def _in_flags(message: str, flags: dict[str, str]) -> str:
    for name, flag in flags.items():
        whole = rf"(?<![\w.'\"/-]){re.escape(name)}"
        message = re.sub(rf"{whole}=(True\b|(?=[\s.,;:)]))", flag, message)
        message = re.sub(rf"{whole}=(?=\S)", f"{flag} ", message)
        message = re.sub(rf"^{re.escape(name)}(?= must )", flag, message)
        if "_" in name:
            message = re.sub(rf"{whole}(?![\w'\"=/])", flag, message)
    return message


def device_named(name: str | None) -> str:
    """The device of ``--device``, or a GPU if there is one."""
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ValueError(
            f"--device {name} is none that torch sees here ({reason}); use --device cpu."
        ) from error
    return name
