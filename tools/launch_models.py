"""Rank the models that launch files of verl, slime and NeMo-RL name.

    python -m tools.launch_models rank --verl DIR --verl-recipe DIR --slime DIR --nemo-rl DIR

It reads the last commit of each checkout and writes docs/records/launch_models.tsv.

A launch file is a shell script or YAML file in `examples` of verl and NeMo-RL, anywhere in
verl-recipe, and in `scripts` and `examples` of slime, `scripts/models` left out. It counts once for
each model that a line other than a comment names, as OWNER/NAME or as a folder of that name.
Endings of converted copies, such as `_torch_dist`, are ignored.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RANKING = ROOT / "docs" / "records" / "launch_models.tsv"

ROOTS: Mapping[str, tuple[str, ...]] = {
    "verl": ("examples/",),
    "verl-recipe": ("",),
    "slime": ("scripts/", "examples/"),
    "nemo-rl": ("examples/",),
}
"""Folders of launch files by project."""
SIZES = "scripts/models/"
"""Files of slime that give the sizes of a model, which launch files include."""
OWNERS = (
    "ByteDance-Seed|HuggingFaceTB|MiniMaxAI|Qwen|THUDM|XiaomiMiMo|allenai|deepseek-ai|google"
    "|inclusionAI|meta-llama|microsoft|mistralai|moonshotai|nvidia|openai|zai-org"
)
_HUB_NAME = re.compile(rf"(?<![\w.-])(?:{OWNERS})/([A-Za-z][\w.-]*\d[\w.-]*)")
_PATH_PART = re.compile(r"(?<=[/\"'=\s:}])[A-Za-z][\w.-]*\d[\w.-]*")
_COPY = re.compile(r"(_torch_dist|_slime|[-_]mcore|\.sh|\.yaml|/)+$", re.IGNORECASE)
_NO_POLICY = re.compile(
    r"gsm8k|math-\d+k|mathinstruct|reward|genrm|judge|dataset|-rm-", re.IGNORECASE
)
"""Data sets, and models that only score."""


def run_git(checkout: Path, *arguments: str) -> str:
    """Return what git prints in a checkout."""
    done = subprocess.run(["git", "-C", str(checkout), *arguments], check=True, capture_output=True)
    return done.stdout.decode(errors="replace")


def list_hub_names(checkout: Path) -> Iterator[str]:
    """Yield the names, without their owners, of the models that any file of a checkout names."""
    for line in run_git(checkout, "grep", "-hIE", f"({OWNERS})/", "HEAD").splitlines():
        yield from _HUB_NAME.findall(line)


def read_launch_files(project: str, checkout: Path) -> Iterator[tuple[str, str]]:
    """Yield the path and the lines other than comments of each launch file at the last commit."""
    for path in run_git(checkout, "ls-tree", "-r", "--name-only", "HEAD").splitlines():
        is_launch_file = path.endswith((".sh", ".yaml", ".yml")) and path.startswith(ROOTS[project])
        if is_launch_file and not (project == "slime" and path.startswith(SIZES)):
            lines = run_git(checkout, "show", f"HEAD:{path}").splitlines()
            yield path, "\n".join(line for line in lines if not line.lstrip().startswith("#"))


def rank(checkouts: Mapping[str, Path]) -> list[tuple[str, set[str]]]:
    """Return the models with the launch files that name them, most frequent ones first."""
    texts = {
        f"{project}:{path}": text
        for project, checkout in checkouts.items()
        for path, text in read_launch_files(project, checkout)
    }
    known = {
        _remove_ending(name).lower(): _remove_ending(name)
        for checkout in checkouts.values()
        for name in list_hub_names(checkout)
    }
    files: dict[str, set[str]] = defaultdict(set)
    for file, text in texts.items():
        for name in [*_HUB_NAME.findall(text), *_PATH_PART.findall(text)]:
            key = _remove_ending(name).lower()
            if key in known and not _NO_POLICY.search(key):
                files[known[key]].add(file)
    return sorted(files.items(), key=lambda item: (-len(item[1]), item[0].lower()))


def _remove_ending(name: str) -> str:
    return _COPY.sub("", name.rstrip("."))


def write_ranking(
    ranking: list[tuple[str, set[str]]], *, checkouts: Mapping[str, Path], num_models: int = 50
) -> None:
    """Write the first models, with the number of launch files in each project."""
    commits = {
        project: run_git(checkout, "log", "-1", "--format=%h of %as").strip()
        for project, checkout in checkouts.items()
    }
    rows = [
        "# Written by tools/launch_models.py from "
        + ", ".join(f"{project} {commit}" for project, commit in commits.items()),
        "\t".join(["rank", "model", "files", *commits]),
    ]
    for position, (model, files) in enumerate(ranking[:num_models], start=1):
        counts = [str(sum(file.startswith(f"{project}:") for file in files)) for project in commits]
        rows.append("\t".join([str(position), model, str(len(files)), *counts]))
    RANKING.write_text("\n".join(rows) + "\n")


def main() -> None:
    """Rank the models of the given checkouts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    ranks = commands.add_parser("rank")
    for project in ROOTS:
        ranks.add_argument(f"--{project}", type=Path, required=True, metavar="DIR")
    options = vars(parser.parse_args())
    checkouts = {project: options[project.replace("-", "_")] for project in ROOTS}
    write_ranking(rank(checkouts), checkouts=checkouts)


if __name__ == "__main__":
    main()
