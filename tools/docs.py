"""Check the documentation pages: run Python blocks, check commands, settings and relative links.

The Python blocks of a page are run as one program in an empty folder, so that a block may use names
of earlier blocks. Its shell blocks form one program too: see tools/page_commands.py. A YAML block
is composed as a configuration of `temper-train`; TOML and JSON are parsed. Printed output is marked
`text`. Keys of settings in the prose must exist. The table of families in docs/models.md must be
that of its record.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import runpy
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.family_table import PAGE as FAMILY_PAGE
from tools.family_table import find_faults as find_family_faults
from tools.inline_settings import find_unknown_settings
from tools.page_commands import (
    PAGES_WITH_CHECKPOINTS,
    PYTHON_INPUTS,
    check_commands,
    check_settings,
)
from tools.pages import PAGES, Block, join_blocks, split_page

_SERVER = multiprocessing.get_context("forkserver")
# Most programs import these, which takes seconds in a process of its own.
_SERVER.set_forkserver_preload(
    [
        "temper_engine_fsdp.engine",
        "temper_trainer.algorithms",
        "tools.family_table",
        "torch._dynamo",
    ]
)
LIMIT_S = 120
"""Time limit for the Python blocks of a page."""

LANGUAGES = ("python", "sh", "yaml", "toml", "json", "text")
"""Languages that a block may be marked with."""

_LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_HEADING = re.compile(r"(?m)^#{1,6}\s+(.+?)\s*$")
_PLACEHOLDER = re.compile(r"@@[A-Z]+|\bTODO\b|\bFIXME\b")
_INLINE_CODE = re.compile(r"`[^`]*`")
_TABLE_RULE = re.compile(r"\|[-:| ]+\|")
_SCHEME = re.compile(r"^[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def find_broken_links(page: Path, prose: str) -> list[str]:
    """Return a sentence for each relative link to a missing file, folder or heading."""
    faults = []
    for number, line in enumerate(prose.splitlines(), start=1):
        for target in _LINK.findall(_INLINE_CODE.sub("", line)):
            path, _, anchor = unquote(target).partition("#")
            file = page.parent / path
            if _SCHEME.match(target):
                continue
            if not file.exists():
                faults.append(f"{page}:{number}: the target of the link {target} does not exist")
            elif anchor and (not path or file.suffix == ".md"):
                target_prose = split_page(file.read_text())[1] if path else prose
                if anchor not in list_anchors(target_prose):
                    faults.append(f"{page}:{number}: no heading matches the link {target}")
    return faults


def list_anchors(prose: str) -> set[str]:
    """Return the anchors of a page's headings, spelled as the site spells them."""
    words = (
        re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in _HEADING.findall(prose)
    )
    return {re.sub(r"[-\s]+", "-", word) for word in words}


def find_broken_tables(page: Path, prose: str) -> list[str]:
    """Return a sentence for each group of table rows without a header."""
    lines = prose.splitlines()
    starts = [
        i
        for i, line in enumerate(lines)
        if line.startswith("|") and not (i and lines[i - 1].startswith("|"))
    ]
    return [
        f"{page}:{i + 1}: these rows of a table have no header: remove the empty line above them, "
        "or add a header"
        for i in starts
        if i + 1 == len(lines) or not _TABLE_RULE.fullmatch(lines[i + 1])
    ]


def find_placeholders(page: Path, prose: str) -> list[str]:
    """Return a sentence for each placeholder, such as one for a number that was never measured."""
    lines = enumerate(prose.splitlines(), start=1)
    return [
        f"{page}:{number}: the placeholder {mark} was not filled in"
        for number, line in lines
        for mark in _PLACEHOLDER.findall(line)
    ]


def run_blocks(page: Path, code: str, *, work: Path | None = None) -> list[str]:
    """Run a page's blocks as one program; return its traceback if it fails.

    Line numbers in the traceback are those of the page. The working directory is `work`, by default
    an empty folder.
    """
    if not code.strip():
        return []
    with tempfile.TemporaryDirectory(prefix="temper-docs-") as folder:
        program, output = Path(folder) / "blocks.py", Path(folder) / "output.txt"
        program.write_text(code)
        empty = Path(folder) / "work"
        empty.mkdir()
        # One thread by default, because other steps of `dev.py test` run meanwhile.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        process = _SERVER.Process(target=_run_program, args=(program, work or empty, output))
        process.start()
        process.join(LIMIT_S)
        if process.exitcode is None:
            process.kill()
            process.join()
            return [f"{page}: the Python blocks took more than {LIMIT_S} s: shorten them"]
        if process.exitcode == 0:
            return []
        text = output.read_text(errors="replace").replace(str(program), str(page))
        return [f"{page}: the Python blocks failed\n{text}"]


def _run_program(program: Path, work: Path, output: Path) -> None:
    """Run a program as `python PROGRAM` would; write what it prints to the file `output`."""
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(work)
    sys.argv, sys.path[0] = [str(program)], str(program.parent)
    runpy.run_path(str(program), run_name="__main__")


def check_page(page: Path, *, name: str) -> list[str]:
    """Check a page and return one sentence for each error.

    `name` is the path of the page relative to the repository.
    """
    blocks, prose = split_page(page.read_text())
    with tempfile.TemporaryDirectory(prefix="temper-docs-") as folder:
        faults = (
            find_broken_links(page, prose)
            + find_broken_tables(page, prose)
            + find_placeholders(page, prose)
            + find_unknown_settings(page, prose, name=name)
            + check_blocks(page, blocks, name=name, folder=Path(folder))
        )
        needs_files = name in PAGES_WITH_CHECKPOINTS or name in PYTHON_INPUTS
        if name in PYTHON_INPUTS:
            PYTHON_INPUTS[name](Path(folder))
        return faults + run_blocks(
            page,
            join_blocks(blocks, "python"),
            work=Path(folder) if needs_files else None,
        )


def check_blocks(page: Path, blocks: Sequence[Block], *, name: str, folder: Path) -> list[str]:
    """Check a page's blocks except for Python, and return one sentence for each error.

    Args:
        page: File of the page.
        blocks: Blocks of the page.
        name: Path of the page relative to the repository.
        folder: An empty folder in which commands run.
    """
    faults = [
        f"{page}:{block.line}: the block's language is {block.language or 'missing'}: "
        f"write one of {', '.join(LANGUAGES)} after the opening fence"
        for block in blocks
        if block.language not in LANGUAGES
    ]
    if commands := join_blocks(blocks, "sh"):
        faults += check_commands(
            commands, page=name, code=join_blocks(blocks, "python"), folder=folder
        )
    for block in (block for block in blocks if block.language == "yaml"):
        if error := check_settings(block.text, folder=folder):
            faults.append(f"{page}:{block.line}: {error}")
    for block in (block for block in blocks if block.language in ("toml", "json")):
        try:
            (tomllib if block.language == "toml" else json).loads(block.text)
        except ValueError as error:
            faults.append(f"{page}:{block.line}: {error}")
    return faults


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the pages of a repository; return 1 if there is an error.

    The first argument is the repository, by default this one; others name the pages to check, by
    default all.
    """
    chosen = sys.argv[1:] if arguments is None else arguments
    root = Path(chosen[0]).resolve() if chosen else Path(__file__).resolve().parent.parent
    pages = sorted({page for pattern in PAGES for page in root.glob(pattern)})
    if named := {root / page for page in chosen[1:]}:
        if unknown := sorted(str(page.relative_to(root)) for page in named.difference(pages)):
            print(f"docs: {', '.join(unknown)}: no such page: give paths below {root}")
            return 1
        pages = sorted(named)
    if not pages:
        print(f"docs: no page matches {', '.join(PAGES)} below {root}: give the repository's root")
        return 1
    faults, num_programs = [], 0
    for page in pages:
        num_programs += any(block.language == "python" for block in split_page(page.read_text())[0])
        faults += check_page(page, name=page.relative_to(root).as_posix())
        if page == root / FAMILY_PAGE:
            faults += find_family_faults(root)
    print(
        "\n".join(faults)
        or f"docs: checked {len(pages)} pages, and ran the Python of {num_programs}"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
