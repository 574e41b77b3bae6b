"""The pages tell the truth: Python blocks run, commands are held to what they call, settings compose, and relative links lead somewhere.

The Python blocks of one page are one program, run in an empty folder, so that a later block may use an earlier one's names; a block
marked `python no-run` is left out. Its shell blocks are one program too: see tools/page_commands.py. A YAML block is composed as a
configuration of `temper-train`, TOML and JSON are parsed, and what a program prints is marked `text`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.page_commands import check_commands, check_settings
from tools.pages import PAGES, Block, program, split_page

LIMIT_S = 120
"""For the Python of one page."""

LANGUAGES = ("python", "python no-run", "sh", "yaml", "toml", "json", "text")
"""What may follow the opening mark of a block."""

_LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_PLACEHOLDER = re.compile(r"@@[A-Z]+|\bTODO\b|\bFIXME\b")
_INLINE_CODE = re.compile(r"`[^`]*`")
_SCHEME = re.compile(r"^[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def broken_links(page: Path, prose: str) -> list[str]:
    """The relative links of a page that lead to no file or folder, a sentence each."""
    found = []
    for number, line in enumerate(prose.splitlines(), start=1):
        for target in _LINK.findall(_INLINE_CODE.sub("", line)):
            path = unquote(target.partition("#")[0])
            if path and not _SCHEME.match(path) and not (page.parent / path).exists():
                found.append(f"{page}:{number}: the link {target} leads nowhere")
    return found


def placeholders(page: Path, prose: str) -> list[str]:
    """Places that were to be filled in, such as a number before its measurement, a sentence each."""
    lines = enumerate(prose.splitlines(), start=1)
    return [f"{page}:{number}: {mark} was never filled in" for number, line in lines for mark in _PLACEHOLDER.findall(line)]


def run_blocks(page: Path, code: str) -> list[str]:
    """Run a page's blocks as one program; its traceback, with the page's own line numbers, if that fails."""
    if not code.strip():
        return []
    with tempfile.TemporaryDirectory(prefix="temper-docs-") as folder:
        program = Path(folder) / "blocks.py"
        program.write_text(code)
        work = Path(folder) / "work"
        work.mkdir()
        try:
            done = subprocess.run(
                [sys.executable, str(program)],
                cwd=work,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
                env=os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
            )
        except subprocess.TimeoutExpired:
            return [f"{page}: its Python blocks took more than {LIMIT_S} s: shorten them, or mark one `python no-run`"]
        if done.returncode == 0:
            return []
        return [f"{page}: its Python blocks fail\n{done.stdout}{done.stderr}".replace(str(program), str(page))]


def check_blocks(page: Path, blocks: Sequence[Block], *, name: str) -> list[str]:
    """What is wrong with a page's blocks, Python's apart.

    Args:
        name: The page's path below the repository.
    """
    found = [
        f"{page}:{block.line}: a block of {block.language or 'no language'}: write one of {', '.join(LANGUAGES)} behind its opening mark"
        for block in blocks
        if block.language not in LANGUAGES
    ]
    with tempfile.TemporaryDirectory(prefix="temper-docs-") as folder:
        code = program(blocks, "python")
        if commands := program(blocks, "sh"):
            found += check_commands(commands, page=name, code=code, folder=Path(folder))
        for block in (block for block in blocks if block.language == "yaml"):
            if fault := check_settings(block.text, folder=Path(folder)):
                found.append(f"{page}:{block.line}: {fault}")
    for block in (block for block in blocks if block.language in ("toml", "json")):
        try:
            (tomllib if block.language == "toml" else json).loads(block.text)
        except ValueError as fault:
            found.append(f"{page}:{block.line}: {fault}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the pages below the given repository (this one by default); 1 if anything is wrong."""
    chosen = sys.argv[1:] if arguments is None else arguments
    root = Path(chosen[0]) if chosen else Path(__file__).resolve().parent.parent
    pages = sorted({page for pattern in PAGES for page in root.glob(pattern)})
    if not pages:
        print(f"docs: no page matches {', '.join(PAGES)} below {root}: give the repository's root")
        return 1
    found, num_programs = [], 0
    for page in pages:
        blocks, prose = split_page(page.read_text())
        code = program(blocks, "python")
        num_programs += bool(code)
        found += broken_links(page, prose) + placeholders(page, prose) + run_blocks(page, code)
        found += check_blocks(page, blocks, name=page.relative_to(root).as_posix())
    print("\n".join(found) or f"docs: {len(pages)} pages, {num_programs} of them with Python that ran")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
