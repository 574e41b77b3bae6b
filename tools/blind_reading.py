r"""Draw anonymous samples of this project and of others, for readers who judge how they read.

    python tools/blind_reading.py draw --seed N --out FOLDER --local . --other FOLDER --other FOLDER
    python tools/blind_reading.py count --out FOLDER --answers FILE

`draw` writes FOLDER/pieces.md with pieces of all projects in random order, in which the names of
the projects are replaced, and FOLDER/key.json with the origin and the size of every piece. A
reader gets pieces.md alone and writes a JSON file: a list of objects with the piece's number, a
"kind" (sentence or name) and the "text" that was reread or guessed. `count` divides these by the
sentences and names of each project.
"""

import argparse
import ast
import io
import json
import random
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SIZES = {"function": 20, "file": 5, "page": 3}
"""Number of pieces of each kind and project."""
PROJECT_NAMES = re.compile(r"temper(?!at)|torchtitan|titan|hugging ?face|\btrl\b", re.IGNORECASE)
LICENSE = re.compile(r"\A(#.*\n)+\n*")
"""The license at the start of a file, which names the project."""
LOCAL_SOURCE = ("packages/engine-*/src/**/*.py", "packages/trainer/src/**/*.py")
LOCAL_PAGES = tuple(f"docs/{folder}*.md" for folder in ("", "how-to/", "engines/", "migration/"))
OTHER_SOURCE = ("torchtitan/**/*.py", "trl/**/*.py")
OTHER_PAGES = ("docs/*.md", "docs/source/*.md", "torchtitan/**/README.md")
FUNCTION_LINES = range(8, 70)
FILE_LINES = range(60, 320)
PAGE_LINES = range(40, 320)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A function, file or page of one project."""

    project: str
    kind: str
    path: str
    text: str


def list_functions(project: str, path: Path) -> Iterator[Piece]:
    """Yield the functions and methods of a file."""
    source = path.read_text()
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        assert node.end_lineno is not None
        begin = min([node.lineno, *(each.lineno for each in node.decorator_list)]) - 1
        if node.end_lineno - begin in FUNCTION_LINES and ast.get_docstring(node):
            text = "\n".join(lines[begin : node.end_lineno])
            yield Piece(project=project, kind="function", path=f"{path}:{node.lineno}", text=text)


def collect(project: str, root: Path, *, is_local: bool) -> dict[str, list[Piece]]:
    """Return all pieces of a project by kind."""
    pieces: dict[str, list[Piece]] = {kind: [] for kind in SIZES}
    for pattern in LOCAL_SOURCE if is_local else OTHER_SOURCE:
        for path in sorted(root.glob(pattern)):
            if "test" in path.relative_to(root).as_posix():
                continue
            pieces["function"] += list_functions(project, path)
            text = LICENSE.sub("", path.read_text())
            if len(text.splitlines()) in FILE_LINES:
                pieces["file"].append(
                    Piece(project=project, kind="file", path=str(path), text=text)
                )
    for pattern in LOCAL_PAGES if is_local else OTHER_PAGES:
        for path in sorted(root.glob(pattern)):
            text = path.read_text()
            if len(text.splitlines()) in PAGE_LINES:
                pieces["page"].append(
                    Piece(project=project, kind="page", path=str(path), text=text)
                )
    return pieces


def split_prose(piece: Piece) -> list[str]:
    """Return the sentences of a page, or those of a piece of code's docstrings and comments."""
    if piece.kind == "page":
        prose = re.sub(r"```.*?```", "", piece.text, flags=re.DOTALL)
    else:
        comments: list[str] = []
        source = _dedent(piece.text)
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            is_text = token.type == tokenize.STRING and token.string.lstrip("rR").startswith('"""')
            if token.type == tokenize.COMMENT or is_text:
                comments.append(token.string.strip('#"r '))
        prose = "\n\n".join(comments)
    parts = re.split(r"(?<=[.!?:])\s+|\n\s*\n|\n\s*(?=[-*|#])", prose)
    return [part for part in parts if len(part.split()) >= 3]


def list_names(piece: Piece) -> set[str]:
    """Return the names that a piece of code defines or assigns; none for a page."""
    if piece.kind == "page":
        return set()
    names: set[str] = set()
    for node in ast.walk(ast.parse(_dedent(piece.text))):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.ClassDef(name=name) | ast.arg(arg=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(attr=name):
                names.add(name)
    return names


def _dedent(text: str) -> str:
    """Remove the indentation of a method's first line from all its lines."""
    width = len(text) - len(text.lstrip(" "))
    lines = text.splitlines()
    return "\n".join(line[width:] if not line[:width].strip() else line for line in lines) + "\n"


def draw(seed: int, out: Path, *, local: Path, others: Sequence[Path]) -> None:
    """Write pieces.md and key.json with equally many pieces of every project."""
    pieces: list[Piece] = []
    for root in (local, *others):
        name = "local" if root == local else root.name
        rng = random.Random(f"{seed} {name}")
        for kind, candidates in collect(name, root, is_local=root == local).items():
            pieces += rng.sample(candidates, SIZES[kind])
    random.Random(seed).shuffle(pieces)
    key, text = [], []
    for number, piece in enumerate(pieces, start=1):
        fence = "~~~~" if piece.kind == "page" else "~~~~python"
        anonymous = PROJECT_NAMES.sub("proj", piece.text)
        text.append(f"## Piece {number} ({piece.kind})\n\n{fence}\n{anonymous}\n~~~~\n")
        counts = {"sentences": len(split_prose(piece)), "names": len(list_names(piece))}
        origin = {"project": piece.project, "kind": piece.kind, "path": piece.path}
        key.append({"piece": number, **origin, **counts})
    out.mkdir(parents=True, exist_ok=True)
    (out / "pieces.md").write_text("\n".join(text))
    (out / "key.json").write_text(json.dumps(key, indent=1))


def count(out: Path, answers: Path) -> None:
    """Print the fractions of reread sentences and of guessed names, by project."""
    key = {entry["piece"]: entry for entry in json.loads((out / "key.json").read_text())}
    marked = Counter(
        (key[each["piece"]]["project"], each["kind"]) for each in json.loads(answers.read_text())
    )
    print("| project | sentences | reread | share | names | guessed | share |")
    print("|---|---|---|---|---|---|---|")
    for project in sorted({entry["project"] for entry in key.values()}):
        own = [entry for entry in key.values() if entry["project"] == project]
        cells: list[object] = [project]
        for field, kind in (("sentences", "sentence"), ("names", "name")):
            total, hit = sum(entry[field] for entry in own), marked[project, kind]
            cells += [total, hit, f"{hit / total:.1%}"]
        print("| " + " | ".join(map(str, cells)) + " |")


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw pieces, or count a reader's answers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    drawing = commands.add_parser("draw")
    drawing.add_argument("--seed", type=int, required=True)
    drawing.add_argument("--local", type=Path, default=Path())
    drawing.add_argument("--other", type=Path, action="append", required=True)
    counting = commands.add_parser("count")
    counting.add_argument("--answers", type=Path, required=True)
    for command in (drawing, counting):
        command.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args(arguments)
    if chosen.command == "draw":
        draw(chosen.seed, chosen.out, local=chosen.local, others=chosen.other)
    else:
        count(chosen.out, chosen.answers)


if __name__ == "__main__":
    main(sys.argv[1:])
