"""``python -m temper_engine_api.conformance --engine NAME [--world-sizes 1,2] [--layouts all] [--report PATH]``: the kit as a command."""

import sys

from temper_engine_api.conformance import KIT, PLUGIN, missing_extra


def main(arguments: list[str] | None = None) -> int:
    """Run the kit; other arguments go to pytest.

    Returns:
        pytest's exit status: 0 when every law held, 4 where the kit's extra is not installed.
    """
    if sentence := missing_extra():
        print(f"ERROR: {sentence}", file=sys.stderr)
        return 4
    import pytest

    chosen = sys.argv[1:] if arguments is None else arguments
    # pytest wants to rewrite the asserts of every module of an entry point; this one and its package are already imported.
    quiet = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
    return int(
        pytest.main(["-p", PLUGIN, "-p", "no:cacheprovider", *quiet, "--pyargs", KIT, *chosen])
    )


if __name__ == "__main__":
    sys.exit(main())
