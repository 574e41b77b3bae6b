"""Collect launch scripts of old trainers from clones of public repositories.

The commits are those of ``public_scripts.tsv``.

    python packages/legacy-shim/tools/collect_scripts.py CLONES OUT

CLONES has a clone, bare or not, of each repository of the table under ``OWNER+NAME`` (``git clone
--bare https://github.com/OWNER/NAME.git CLONES/OWNER+NAME``). Every script is written once to OUT,
which must not exist; none of them belongs into this repository. The nightly tests of
``tests/scripts`` read ``$TEMPER_TEST_DATA/legacy/scripts``, so let OUT be that.
"""

import argparse
import hashlib
import re
import subprocess
from pathlib import Path

TABLE = Path(__file__).with_name("public_scripts.tsv")
ENDINGS = (".sh", ".bash", ".slurm", ".sbatch")
NAMED = re.compile(
    rb"verl\.|recipe\.|main_ppo|sft_trainer|main_dapo|main_generation|actor_rollout_ref|_ppo"
)
"""What a script that starts an old trainer, or a fork's, names somewhere."""


def git(clone: Path, *arguments: str) -> bytes:
    """Run git in a clone, bare or not, and return its output."""
    folder = next(
        (place for place in (clone / ".git", clone / "repo", clone) if (place / "HEAD").exists()),
        clone,
    )
    return subprocess.run(
        ["git", "--git-dir", str(folder), *arguments], capture_output=True, check=True
    ).stdout


def scripts_of(clone: Path, commit: str) -> dict[str, bytes]:
    """Scripts of one repository by their path."""
    paths = git(clone, "ls-tree", "-r", "-z", "--name-only", commit).decode().split("\0")
    found = {
        path: git(clone, "show", f"{commit}:{path}") for path in paths if path.endswith(ENDINGS)
    }
    return {path: content for path, content in found.items() if NAMED.search(content)}


def main() -> None:
    """Collect them, and say how many."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("clones", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    rows = [line.split("\t") for line in TABLE.read_text().splitlines()[1:]]
    seen: set[str] = set()
    options.out.mkdir(parents=True)
    for repository, commit in rows:
        clone = options.clones / repository.replace("/", "+")
        found = scripts_of(clone, commit)
        for path, content in found.items():
            digest = hashlib.sha1(content).hexdigest()
            if digest not in seen:
                seen.add(digest)
                target = options.out / clone.name / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
        print(f"{repository} {commit}: {len(found)} scripts")
    print(f"{len(seen)} different ones in {options.out}")


if __name__ == "__main__":
    main()
