"""Draw a set of third-party launch scripts by a seed, and write which they are.

    python packages/legacy-shim/tools/draw_scripts.py CLONES
    python packages/legacy-shim/tools/draw_scripts.py CLONES --scripts OUT
    python packages/legacy-shim/tools/draw_scripts.py CLONES --python OUT

CLONES has a clone, bare or not, of each repository under ``OWNER+NAME``. The first form draws from
``drawn_repositories.txt`` and writes ``drawn_scripts.tsv``: repository, commit, path and SHA-1 of
each script. The second one writes the scripts of that table to OUT without drawing again, with the
YAML files and the other shell scripts of their repositories, which they may refer to. None of them
belongs into this repository. The nightly test ``tests/scripts/test_drawn_scripts.py`` reads
``$TEMPER_TEST_DATA/legacy/drawn``, so let OUT be that. The third form writes Python files of these
repositories that import verl, for ``temper-migrate imports OUT --json``.

The draw: repositories of the list are shuffled with the seed. One that cannot be cloned is left
out. A repository's scripts are those that name an old trainer, without copies of verl's own files
at any commit, and without those of the repositories before it. At most ``PER_REPOSITORY`` are drawn
from each, until there are ``SCRIPTS`` from at least ``REPOSITORIES``. Python files are drawn with
the same seed, as many from each repository, and none of the folders that ``COPIED`` matches.
"""

import argparse
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from collect_scripts import ENDINGS, NAMED, TABLE, git

SEED = 24
SCRIPTS, REPOSITORIES, PER_REPOSITORY = 300, 30, 12
FRAME = Path(__file__).with_name("drawn_repositories.txt")
DRAWN = Path(__file__).with_name("drawn_scripts.tsv")
UPSTREAM = ("volcengine/verl", "verl-project/verl", "verl-project/verl-recipe")
"""Their own scripts are in the sample invocations already."""
COPIED = re.compile(r"(^|/)(verl|recipe|tests)(\W[^/]*)?/")
"""Folders that forks copy from verl and edit, also under a name such as ``verl - copy``."""
IMPORTS = re.compile(rb"^\s*(from|import)\s+verl\b", re.MULTILINE)

Row = tuple[str, str, str, str]


def main() -> None:
    """Draw the set, or write the scripts of the drawn set."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("clones", type=Path)
    parser.add_argument(
        "--scripts",
        type=Path,
        metavar="OUT",
        help="write the drawn scripts there; OUT must not exist",
    )
    parser.add_argument(
        "--python",
        type=Path,
        metavar="OUT",
        help="write drawn Python files there; OUT must not exist",
    )
    options = parser.parse_args()
    if options.scripts:
        write_scripts(options.clones, options.scripts)
    if options.python:
        write_python(options.clones, options.python)
    if options.scripts or options.python:
        return
    rows = list(draw(options.clones))
    lines = ["\t".join(row) for row in [("repository", "commit", "path", "sha1"), *rows]]
    DRAWN.write_text("\n".join(lines) + "\n")
    print(f"{len(rows)} scripts from {len({row[0] for row in rows})} repositories in {DRAWN.name}")


def draw(clones: Path) -> Iterator[Row]:
    """Yield the drawn scripts, repository by repository.

    Raises:
        SystemExit: the clones do not have enough scripts.
    """
    seen = _upstream_blobs(clones)
    used = {line.split("\t")[0] for line in TABLE.read_text().splitlines()[1:]}
    names = [line for line in FRAME.read_text().split() if line not in used]
    generator = random.Random(SEED)
    generator.shuffle(names)
    num_scripts = num_repositories = 0
    for name in names:
        clone = _clone(clones, name)
        if not clone.is_dir():
            continue
        commit = git(clone, "rev-parse", "HEAD").decode().strip()
        own = [(path, blob) for path, blob in _scripts(clone, commit) if blob not in seen]
        seen.update(blob for _, blob in own)
        unique = list({blob: (path, blob) for path, blob in own}.values())
        drawn = sorted(generator.sample(unique, min(PER_REPOSITORY, len(unique))))
        yield from ((name, commit, path, blob) for path, blob in drawn)
        num_scripts, num_repositories = num_scripts + len(drawn), num_repositories + bool(drawn)
        if num_scripts >= SCRIPTS and num_repositories >= REPOSITORIES:
            return
    sys.exit(
        f"{num_scripts} scripts of {num_repositories} repositories: add clones from {FRAME.name}, "
        "in the drawn order"
    )


def write_scripts(clones: Path, out: Path) -> None:
    """Write the shell scripts and YAML files of each drawn repository below a folder of its own."""
    for name, commit in _drawn_commits().items():
        clone = _clone(clones, name)
        for path, blob in _files(clone, commit, (*ENDINGS, ".yaml", ".yml")):
            _write(out / clone.name / path, _content(clone, blob))


def write_python(clones: Path, out: Path) -> None:
    """Draw Python files that import verl, and write them below a folder for each repository."""
    seen = _upstream_blobs(clones)
    generator = random.Random(SEED)
    for name, commit in _drawn_commits().items():
        clone = _clone(clones, name)
        own = {}
        for path, blob in _files(clone, commit, (".py",)):
            if blob not in seen and not COPIED.search(path):
                content = _content(clone, blob)
                if content is not None and IMPORTS.search(content):
                    own[path] = content
                    seen.add(blob)
        for path in generator.sample(sorted(own), min(PER_REPOSITORY, len(own))):
            _write(out / clone.name / path, own[path])


def _drawn_commits() -> dict[str, str]:
    return dict(line.split("\t")[:2] for line in DRAWN.read_text().splitlines()[1:])


def _write(path: Path, content: bytes | None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if content is not None:
        path.write_bytes(content)


def _clone(clones: Path, name: str) -> Path:
    return clones / name.replace("/", "+")


def _upstream_blobs(clones: Path) -> set[str]:
    return {blob for name in UPSTREAM for blob in _all_blobs(_clone(clones, name))}


def _all_blobs(clone: Path) -> set[str]:
    """Return every object of a clone."""
    listed = git(
        clone, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)", "--unordered"
    )
    return set(listed.decode().split())


def _scripts(clone: Path, commit: str) -> Iterator[tuple[str, str]]:
    """Yield path and object of the scripts at a commit that name an old trainer."""
    for path, blob in _files(clone, commit, ENDINGS):
        content = _content(clone, blob)
        if content is not None and NAMED.search(content):
            yield path, blob


def _files(clone: Path, commit: str, endings: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield path and object of the files at a commit."""
    for entry in (
        git(clone, "ls-tree", "-r", "-z", commit).decode(errors="surrogateescape").split("\0")
    ):
        meta, _, path = entry.partition("\t")
        if path.endswith(endings) and path.isprintable() and meta.split()[1] == "blob":
            yield path, meta.split()[2]


def _content(clone: Path, blob: str) -> bytes | None:
    """Return a file; None for a large one, which a clone may lack."""
    try:
        return git(clone, "show", blob)
    except subprocess.CalledProcessError:
        return None


if __name__ == "__main__":
    main()
