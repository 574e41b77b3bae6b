"""Create a third-party engine from a template: `python tools/new_engine.py FOLDER NAME`.

Copies tools/templates/engine to FOLDER under the name of your engine. NAME is a Python name such as
`acme_engine`; the distribution is then `acme-engine` and its class `AcmeEngine`.
"""

from __future__ import annotations

import argparse
import keyword
import sys
from collections.abc import Sequence
from pathlib import Path

TEMPLATE = Path(__file__).resolve().parent / "templates" / "engine"

TAKEN = frozenset({*sys.stdlib_module_names, "fsdp", "megatron", "pytest", "torch", "transformers"})
"""Modules that the new package would hide, and engines that exist already.

Names that start with `temper_` are reserved too.
"""


def new_engine(folder: Path, name: str) -> list[Path]:
    """Copy the template and return the files that were written.

    Raises:
        ValueError: If the name is invalid or in use, or the folder is not empty.
    """
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower():
        raise ValueError(
            f"{name!r} is not a valid package name: use lower-case letters, digits and "
            "underscores, such as acme_engine."
        )
    if name in TAKEN or name.startswith("temper_"):
        raise ValueError(
            f"{name!r} is the name of an existing engine or library: choose another, "
            "such as acme_engine."
        )
    if folder.is_file():
        raise ValueError(f"{folder} is a file: name a new folder.")
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: name a new folder.")
    stem = "".join(word.capitalize() for word in name.removesuffix("_engine").split("_"))
    written = []
    for source in sorted(
        path for path in TEMPLATE.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ):
        target = folder / str(source.relative_to(TEMPLATE)).replace("my_engine", name)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = (
            source.read_text()
            .replace("my_engine", name)
            .replace("my-engine", name.replace("_", "-"))
        )
        target.write_text(
            text.replace("MyEngine", f"{stem}Engine").replace("MyConfig", f"{stem}Config")
        )
        written.append(target)
    return written


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, prog="tools/new_engine.py")
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    chosen = parser.parse_args(arguments)
    try:
        for path in new_engine(chosen.folder, chosen.name):
            print(path)
    except ValueError as error:
        print(f"new_engine: {error}", file=sys.stderr)
        return 1
    print(f"next: pip install -e '{chosen.folder}[test]', then follow its README.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
