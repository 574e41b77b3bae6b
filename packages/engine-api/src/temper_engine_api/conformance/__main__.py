"""``python -m temper_engine_api.conformance --engine NAME [--world-sizes 1,2] [--layouts all] [--report PATH]``: the kit as a command."""

import sys

import pytest

from temper_engine_api.conformance.entry_point import KIT, PLUGIN


def main(arguments: list[str] | None = None) -> int:
    """Run the kit; other arguments go to pytest.

    Returns:
        pytest's exit status: 0 when every law held.
    """
    chosen = sys.argv[1:] if arguments is None else arguments
    # pytest wants to rewrite the asserts of every module of an entry point; this one and its package are already imported.
    quiet = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
    return int(pytest.main(["-p", PLUGIN, "-p", "no:cacheprovider", *quiet, "--pyargs", KIT, *chosen]))


if __name__ == "__main__":
    sys.exit(main())
