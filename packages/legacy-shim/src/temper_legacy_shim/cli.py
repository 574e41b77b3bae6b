"""The command ``temper-migrate``: one sub-command for each thing that an older system leaves behind.

A sub-command imports what it needs when it runs, so that the command itself starts without torch.
"""

import gc
import sys

import typer

from temper_legacy_shim import cli_checkpoint, cli_config, cli_doctor, cli_imports, cli_script
from temper_legacy_shim.errors import ShimError

_OBJECTS_BETWEEN_COLLECTIONS = 100_000
"""Python's 700 cost a tenth of the start: modules and indexes of checkpoints make many objects and hardly any cycles."""
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="temper-migrate",
    help="Carry what older post-training systems left behind over to Temper.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # half of the start would be rich's Markdown, for a help without any
)
cli_checkpoint.register(app)
cli_config.register(app)
cli_script.register(app)
cli_imports.register(app)
cli_doctor.register(app)


@app.callback()
def _root() -> None:
    """Keep sub-commands, also while there are few."""


def main() -> None:
    """Run the command; a failure that a user can mend is one message and exit code 1."""
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
    try:
        app()
    except ShimError as error:
        _say(f"{type(error).__name__}: {error}", style="red")
        sys.exit(EXIT_FAILED)
    except SystemExit as end:  # typer makes it of Ctrl-C, without a word
        if end.code == EXIT_INTERRUPTED:
            _say("interrupted; run the same command again to go on", style="")
        raise


def _say(sentence: str, *, style: str) -> None:
    from rich.console import Console

    Console(stderr=True, highlight=False, soft_wrap=True).print(sentence, style=style, markup=False)
