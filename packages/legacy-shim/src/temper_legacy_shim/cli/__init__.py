"""The command ``temper-migrate``, whose sub-commands import what they need when they run."""

import gc
import sys
from importlib.metadata import version

import typer

from temper_legacy_shim.cli import (
    checkpoint_command,
    config_command,
    doctor_command,
    imports_command,
    script_command,
)
from temper_legacy_shim.errors import ShimError, UsageError

_OBJECTS_BETWEEN_COLLECTIONS = 100_000
"""Python's 700 cost a tenth of the start: checkpoints have many objects, few cycles."""
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="temper-migrate",
    help="Move scripts, configurations, checkpoints and code of verl to Temper.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # half of the start would be rich's Markdown, for a help without any
)
checkpoint_command.register(app)
config_command.register(app)
script_command.register(app)
imports_command.register(app)
doctor_command.register(app)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        print(f"temper-migrate {version('temper-legacy-shim')}")
        raise typer.Exit


@app.callback()
def _root(
    _: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Keep sub-commands, also while there are few."""


def main() -> None:
    """Run the command; a failure the user can fix is one message.

    Exit code 2: wrong arguments, such as an input that does not exist; 1: any other failure.
    """
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
    arguments = sys.argv[1:]
    if arguments[:1] == ["--help"]:
        # `--help COMMAND` as in `temper-train`; typer would ignore the second word.
        arguments = [*arguments[1:], "--help"]
    try:
        app(arguments)
    except ShimError as error:
        _explain(f"{type(error).__name__}: {error}", style="red")
        sys.exit(EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED)
    except SystemExit as end:  # typer makes it of Ctrl-C, without a word
        if end.code == EXIT_INTERRUPTED:
            _explain("interrupted; run the same command again to go on", style="")
        raise
    finally:
        # Python collects garbage at exit, which takes 0.8 s if torch has been imported.
        gc.freeze()


def _explain(sentence: str, *, style: str) -> None:
    from rich.console import Console

    Console(stderr=True, highlight=False, soft_wrap=True).print(sentence, style=style, markup=False)
