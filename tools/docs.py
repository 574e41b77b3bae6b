"""The pages tell the truth: every Python block runs and every relative link leads somewhere.

The blocks of one page are one program, run in an empty folder, so that a later block may use an earlier one's names;
a block marked `python no-run` is left out. Standard library alone.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

PAGES = ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "packages/*/README.md")

LIMIT_S = 120
"""For one page."""

_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})\s*(.*?)\s*$")
_LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_INLINE_CODE = re.compile(r"`[^`]*`")
_SCHEME = re.compile(r"^[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def split_page(text: str) -> tuple[str, str]:
    """A page as (its Python blocks, its prose), each with every line where it stood and the other's lines empty."""
    code, prose = [], []
    fence, is_python = "", False
    for line in text.splitlines():
        mark = _FENCE.match(line)
        is_border = False
        if mark and not fence:
            words = mark.group(2).split()
            fence, is_python, is_border = mark.group(1), words == ["python"], True
        elif mark and mark.group(1).startswith(fence) and not mark.group(2):
            fence, is_border = "", True
        code.append(line if fence and is_python and not is_border else "")
        prose.append("" if fence or is_border else line)
    return "\n".join(code), "\n".join(prose)


def broken_links(page: Path, prose: str) -> list[str]:
    """The relative links of a page that lead to no file or folder, a sentence each."""
    found = []
    for number, line in enumerate(prose.splitlines(), start=1):
        for target in _LINK.findall(_INLINE_CODE.sub("", line)):
            path = unquote(target.partition("#")[0])
            if path and not _SCHEME.match(path) and not (page.parent / path).exists():
                found.append(f"{page}:{number}: the link {target} leads nowhere")
    return found


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
        code, prose = split_page(page.read_text())
        num_programs += bool(code.strip())
        found += broken_links(page, prose) + run_blocks(page, code)
    print("\n".join(found) or f"docs: {len(pages)} pages, {num_programs} of them with Python that ran")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
