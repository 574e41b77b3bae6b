"""``python -m temper_engine_api.conformance.side_by_side A.json B.json --report PATH``: several runs in one report.

Runs of one engine in different layouts count as one.
"""

import argparse
import sys
from pathlib import Path

from temper_engine_api.conformance.findings import Findings, from_json, joined
from temper_engine_api.conformance.report import render


def main(arguments: list[str] | None = None) -> int:
    """Write the report; 2 where a file holds no findings, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m temper_engine_api.conformance.side_by_side", description=__doc__
    )
    parser.add_argument("findings", nargs="+", type=Path, help="what --findings wrote")
    parser.add_argument("--report", required=True, type=Path, help="markdown file to write")
    chosen = parser.parse_args(arguments)
    runs: list[Findings] = []
    for path in chosen.findings:
        try:
            runs.append(from_json(path.read_text()))
        except (OSError, ValueError) as error:
            sys.stderr.write(f"{path}: {error}\n")
            return 2
    chosen.report.write_text(render(joined(runs)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
