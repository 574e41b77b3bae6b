"""Run the conformance kit.

``python -m temper_engine_api.conformance --engine NAME [--world-sizes 1,2] [--layouts all] [...]``
"""

import sys

from temper_engine_api.conformance import KIT, PLUGIN, describe_missing_extra


def main(arguments: list[str] | None = None) -> int:
    """Run the kit with the given arguments; all of them go to pytest.

    Returns:
        pytest's exit status: 0 if all tests passed; 4 also if the optional dependencies of
            the kit are not installed.
    """
    if message := describe_missing_extra():
        print(f"ERROR: {message}", file=sys.stderr)
        return 4
    import pytest

    chosen = sys.argv[1:] if arguments is None else arguments
    # pytest rewrites asserts when it imports a module. Our package is imported already, so pytest
    # warns that it cannot rewrite it. This does no harm: the test modules are imported later.
    quiet = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
    defaults = ("-p", PLUGIN, "-p", "no:cacheprovider", "--durations=10", *quiet)
    return int(pytest.main([*defaults, "--pyargs", KIT, *chosen]))


if __name__ == "__main__":
    sys.exit(main())
