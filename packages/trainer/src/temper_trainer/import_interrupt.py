"""Answer Ctrl-C in one line while the command's modules are imported; the command imports it first.

Imports take most of a second, in which no other module could catch the exception.
"""

import sys
from types import TracebackType


def _print_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print a line for an interrupt, and a traceback for anything else; for `sys.excepthook`."""
    if issubclass(kind, KeyboardInterrupt):
        sys.stderr.write("interrupted before the run was started\n")
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _print_uncaught
