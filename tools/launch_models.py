"""Rank the models that launch files of verl, slime and NeMo-RL name, and check them.

    python -m tools.launch_models rank --verl DIR --verl-recipe DIR --slime DIR --nemo-rl DIR
    python -m tools.launch_models check

`rank` reads the last commit of each checkout and writes docs/records/launch_models.tsv. `check`
writes the config.json of each of the first 20 models at its published size, calls
`temper-train --check` with both engines, and writes docs/records/launch_models.md.

A launch file is a shell script or YAML file in `examples` of verl and NeMo-RL, anywhere in
verl-recipe, and in `scripts` and `examples` of slime, `scripts/models` left out. It counts once for
each model that a line other than a comment names, as OWNER/NAME or as a folder of that name.
Endings of converted copies, such as `_torch_dist`, are ignored.
"""

from __future__ import annotations

import argparse
import json
import re
import struct
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from temper_engine_api.specs import ModelSpec
from temper_engine_fsdp.model import packed_attention
from temper_engine_fsdp.model.huggingface_model import build_model
from temper_engine_fsdp.model.streaming_load import use_meta_parameters
from temper_engine_fsdp.model.weight_names import read_file_names

ROOT = Path(__file__).resolve().parent.parent
RANKING = ROOT / "docs" / "records" / "launch_models.tsv"
PAGE = RANKING.with_suffix(".md")
CONFIGS = ROOT / "tools" / "launch_model_sizes.json"
"""Published config.json of each model, without what does not change it; or a model like it."""
NUM_CHECKED = 20
SHARD_BYTES = 4 << 30
"""Largest file of weights, unless a tensor is larger: a host maps files of its memory's size."""
ENGINES = ("fsdp", "megatron")
CHECK_COMMAND = (sys.executable, "-m", "temper_trainer", "--check")

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


def check_models() -> list[tuple[str, str, dict[str, str]]]:
    """Return name, model type and the message per engine of the first models; empty if accepted."""
    packed_attention.register_kernels()
    configs = json.loads(CONFIGS.read_text())
    rows = [line.split("\t") for line in RANKING.read_text().splitlines()[2:]]
    verdicts = []
    for row in rows[:NUM_CHECKED]:
        fields = configs[row[1]]
        if isinstance(fields, str):
            fields = configs[fields]
        with tempfile.TemporaryDirectory() as folder:
            _write_model(Path(folder), fields)
            messages = {engine: check_model(Path(folder), engine) for engine in ENGINES}
        verdicts.append((row[1], fields["model_type"], messages))
        print(row[1], messages, flush=True)
    return verdicts


def _write_model(folder: Path, fields: Mapping[str, object]) -> None:
    """Write a model's config, headers of weights, a tokenizer of characters, and rows of data."""
    (folder / "config.json").write_text(json.dumps(fields))
    _write_headers(folder)
    entries = {"<eos>": 0, **{chr(code): code for code in range(32, 127)}}
    tokenizer = Tokenizer(models.WordLevel(entries, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    row = {"question": "1 + 1 =", "answer": "#### 2"}
    (folder / "train.jsonl").write_text((json.dumps(row) + "\n") * 8)


def _write_headers(folder: Path) -> None:
    """Write weights whose header has all names and shapes, and whose data are a hole in the file.

    The names are those that transformers saves, with one tensor per expert where files have that.
    """
    spec = ModelSpec(path=str(folder))
    with use_meta_parameters():
        model = build_model(spec, attention=packed_attention.SDPA_VARLEN, load_weights=False)
    file_names = read_file_names(model)
    saved = model.state_dict().keys()
    tensors = [*model.named_parameters(), *model.named_buffers()]
    shapes = [
        named
        for name, tensor in tensors
        if name in saved
        for named in file_names.list_shapes(name, tensor.shape)
    ]
    shards: list[dict[str, Any]] = [{}]
    weight_map, end = {}, 0
    for name, shape in shapes:
        if end + 2 * shape.numel() > SHARD_BYTES and shards[-1]:
            shards.append({})
            end = 0
        start, end = end, end + 2 * shape.numel()
        shards[-1][name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
        weight_map[name] = f"model-{len(shards)}.safetensors"
    for number, header in enumerate(shards, start=1):
        text = json.dumps(header).encode()
        last = max(entry["data_offsets"][1] for entry in header.values())
        with open(folder / f"model-{number}.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(file.tell() + last)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def check_model(folder: Path, engine: str) -> str:
    """Return the error of `temper-train --check` for a model and an engine; empty if accepted."""
    done = subprocess.run(
        [
            *(*CHECK_COMMAND, "algorithm=grpo"),
            *(f"model_engine={engine}", f"actor.engine.model.path={folder}", "data.train=jsonl"),
            *(f"data.train.paths=[{folder}/train.jsonl]", f"run.dir={folder}/run"),
            *("batching.prompts_per_step=4", "run.total_steps=2"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return ""
    return _read_error(done).replace(str(folder), "DIR")


def _read_error(done: subprocess.CompletedProcess[str]) -> str:
    """Return the configuration error of a command that failed, or its last line; never empty."""
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    error = "\n".join(lines).partition("configuration error:")[2]
    last = lines[-1] if lines else ""
    return " ".join(error.split()) or last.strip() or f"exit status {done.returncode}"


def render_page(verdicts: Sequence[tuple[str, str, dict[str, str]]]) -> str:
    """Return the page with the results of `--check` per model and engine."""
    rows = [
        "# The models that launch files name most",
        "",
        "`python -m tools.launch_models check` wrote each config.json at its published size and",
        "called `temper-train --check` for GRPO with each engine. The weight files had headers and",
        "no data. The [ranking](launch_models.tsv), which `tools/launch_models.py` explains, was",
        "committed before the first check.",
        "",
        "| rank | model | `model_type` | " + " | ".join(ENGINES) + " |",
        "|---|---|---|" + "---|" * len(ENGINES),
    ]
    for position, (model, model_type, messages) in enumerate(verdicts, start=1):
        cells = [messages[engine].replace("|", r"\|") or "accepted" for engine in ENGINES]
        rows.append(f"| {position} | {model} | {model_type} | " + " | ".join(cells) + " |")
    counts = [
        f"{sum(not messages[engine] for *_, messages in verdicts)} of {len(verdicts)} ({engine})"
        for engine in ENGINES
    ]
    rows += ["", f"Accepted: {', '.join(counts)}."]
    return "\n".join(rows) + "\n"


def main() -> None:
    """Rank the models of the given checkouts, or check the first ones."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    ranks = commands.add_parser("rank")
    for project in ROOTS:
        ranks.add_argument(f"--{project}", type=Path, required=True, metavar="DIR")
    commands.add_parser("check")
    options = vars(parser.parse_args())
    if options["command"] == "check":
        PAGE.write_text(render_page(check_models()))
        return
    checkouts = {project: options[project.replace("-", "_")] for project in ROOTS}
    write_ranking(rank(checkouts), checkouts=checkouts)


if __name__ == "__main__":
    main()
