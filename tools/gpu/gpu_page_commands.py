r"""Run the commands for GPUs of `docs/how-to/gpu.md` or the README, without downloads.

    python -m tools.gpu.gpu_page_commands --out FOLDER --data FOLDER --rollout-python PYTHON \
        [--page README.md] [--runs one-gpu,...] [--gpus 2,3] [--steps 4] [--override SETTING] \
        [--check]

Each `temper-train` command is read from the page and run in FOLDER. Only `run.total_steps` and the
settings of `--override` are changed. `--runs` selects commands by their `run.dir`. Before the runs,
a model with the published shape and random weights is written for each model that the commands
name. Its tokenizer is trained on the problems in `--data`, a folder with `train.jsonl` and
`test.jsonl` of GSM8K. With random weights almost every completion reaches the token limit.

PYTHON is an interpreter with vLLM, temper-engine-api and temper-trainer, and takes the place of
`rollout-env/bin/python`. Rows with the medians of all steps but the first are appended to
FOLDER/rows.jsonl. They also have the first and the largest memory in use on each GPU and by each
process, as nvidia-smi reports it; `pid` is the process of the actor. Commands in
FOLDER/finished.jsonl are left out, so a repeated call continues. The command that was interrupted
starts again, because its times would otherwise contain a second start: its folder is renamed to
NAME.superseded-N. `--check` writes the same files, and then only validates the settings.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import transformers

from temper_trainer.config.data import TokenizerConfig
from temper_trainer.data.trained_tokenizer import END, PAD, train_tokenizer
from tools.gpu.engine_fsdp import provide_entry_points
from tools.gpu.trainer_vllm import summarize_metrics, tail, watch
from tools.gpu.workload import CARDS, FinishedJobs, Rows, set_aside_run
from tools.pages import split_page

ROOT = Path(__file__).resolve().parents[2]
PAGE = "docs/how-to/gpu.md"
MODELS = {"Qwen2.5-0.5B-Instruct": "Qwen2.5-0.5B", "Qwen3-8B": "Qwen3-8B"}
"""Maps a model's folder in the commands to its shape in `CARDS`."""
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def read_commands(page: str = PAGE) -> dict[str, tuple[str, ...]]:
    """Return the arguments of each command with `rollout=vllm`, by the name of its run folder."""
    commands = {}
    for block in split_page((ROOT / page).read_text())[0]:
        for line in block.text.replace("\\\n", " ").splitlines():
            if line.startswith("temper-train ") and "rollout=vllm" in line:
                words = tuple(shlex.split(line, comments=True)[1:])
                commands[get_setting(words, "run.dir").rpartition("/")[2]] = words
    return commands


def get_setting(words: Iterable[str], name: str) -> str:
    """Return the value of a setting on a command line."""
    return next(word for word in words if word.startswith(f"{name}=")).partition("=")[2]


def write_model(folder: Path, card: str, texts: list[str]) -> None:
    """Write a model with random weights and a tokenizer trained on the texts, unless it exists."""
    if folder.exists():
        return
    # Written under another name and renamed at the end, so that no incomplete model is used.
    final, folder = folder, folder.with_name(f"{folder.name}.incomplete")
    config = transformers.AutoConfig.for_model(**dict(CARDS[card]))
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tokenizer = train_tokenizer(TokenizerConfig(kind="bpe", vocab_size=8192), texts)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": PAD, "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(_CHAT_TEMPLATE)
    model.save_pretrained(folder)
    folder.rename(final)
    del model
    torch.cuda.empty_cache()


def prepare_folder(
    out: Path, *, data: Path, rollout_python: Path, commands: list[tuple[str, ...]]
) -> None:
    """Write the files that the commands read: data, models and the servers' interpreter."""
    texts = []
    for name in ("train.jsonl", "test.jsonl"):
        lines = (data / name).read_text()
        (out / name).write_text(lines)
        rows = map(json.loads, lines.splitlines())
        texts += [row[field] for row in rows for field in ("question", "answer")]
    interpreter = out / "rollout-env" / "bin" / "python"
    interpreter.parent.mkdir(parents=True, exist_ok=True)
    # A script instead of a link: Python finds its environment by the path that started it.
    interpreter.write_text(f'#!/bin/sh\nexec {shlex.quote(str(rollout_python))} "$@"\n')
    interpreter.chmod(0o755)
    for name in {get_setting(words, "actor.engine.model.path") for words in commands}:
        # The README names models as the Hub does, with their owner.
        write_model(out / name, MODELS[name.rpartition("/")[2]], texts)


MEMORY_QUERIES = {
    "gpus": "--query-gpu=index,memory.used",
    "processes": "--query-compute-apps=pid,used_gpu_memory",
}
"""Queries of nvidia-smi for the MiB in use, by GPU and by process."""


@contextmanager
def record_memory(out: Path, name: str) -> Iterator[None]:
    """Write the memory in use to a file per query, five times a second, if there are GPUs."""
    with ExitStack() as stack:
        for kind, query in MEMORY_QUERIES.items() if torch.cuda.is_available() else ():
            file = stack.enter_context((out / f"{name}-{kind}.csv").open("w"))
            command = ["nvidia-smi", query, "--format=csv,noheader,nounits", "--loop-ms=200"]
            process = stack.enter_context(subprocess.Popen(command, stdout=file))
            stack.callback(process.terminate)
        yield


def summarize_memory(path: Path) -> dict[str, list[int]]:
    """Return the first and the largest MiB in use by GPU or process."""
    summary: dict[str, list[int]] = {}
    # The last line may be incomplete, because the recording was terminated.
    for line in path.read_text().split("\n")[:-1] if path.exists() else ():
        key, used = line.split(", ")
        first, largest = summary.get(key, (int(used), 0))
        summary[key] = [first, max(largest, int(used))]
    return summary


def run_command(rows: Rows, name: str, words: list[str], chosen: argparse.Namespace) -> bool:
    """Run a command in the folder, add its row, and return whether it succeeded."""
    out = chosen.out.resolve()
    run = out / get_setting(words, "run.dir")
    environment = os.environ | {"VLLM_USE_FLASHINFER_SAMPLER": "0", "PYTHONFAULTHANDLER": "1"}
    if chosen.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = chosen.gpus
    if not chosen.check:
        set_aside_run(run)
    begin = time.perf_counter()
    with record_memory(out, name), (out / f"{name}.log").open("w") as log:
        command = [sys.executable, "-m", "temper_trainer", *words]
        process = subprocess.Popen(
            command, cwd=out, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        code, _ = watch(process, run / "metrics.jsonl", kill_after=None, limit_s=chosen.limit)
    row: dict[str, object] = {
        "page": chosen.page,
        "run": name,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "exit": code,
        "pid": process.pid,
        "memory_mib": {
            kind: summarize_memory(out / f"{name}-{kind}.csv") for kind in MEMORY_QUERIES
        },
        "overrides": chosen.override,
        "wall_s": round(time.perf_counter() - begin, 1),
    }
    if code != 0:
        row["log"] = tail(out / f"{name}.log")
        row["server_log"] = tail(run / "rollout" / "replica-0.log")
    rows.add(row | summarize_metrics(run / "metrics.jsonl"))
    return code == 0


def main() -> None:
    """Read the command line, and run or check the chosen commands."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rollout-python", type=Path, default=Path(sys.executable))
    parser.add_argument("--page", default=PAGE, help="page of the commands; default: %(default)s")
    parser.add_argument("--runs", help="last parts of run.dir, such as one-gpu; default: all")
    parser.add_argument("--gpus", help="GPUs to use, such as 2,3; default: all")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--limit", type=float, default=540.0, help="time limit of a run in seconds")
    parser.add_argument("--override", action="append", default=[], help="a setting of every run")
    parser.add_argument("--check", action="store_true")
    chosen = parser.parse_args()
    commands = read_commands(chosen.page)
    names = chosen.runs.split(",") if chosen.runs else list(commands)
    unknown = [name for name in names if name not in commands]
    if unknown:
        parser.error(f"{chosen.page} has no {unknown}; choose from {list(commands)}")
    chosen.out.mkdir(parents=True, exist_ok=True)
    steps = f"run.total_steps={chosen.steps}"
    prepare_folder(
        chosen.out,
        data=chosen.data,
        rollout_python=chosen.rollout_python.absolute(),
        commands=[commands[name] for name in names],
    )
    rows = Rows(path=chosen.out / "rows.jsonl")
    finished = FinishedJobs(path=chosen.out / "finished.jsonl")
    check = ["--check"] if chosen.check else []
    with provide_entry_points():
        for name in names:
            words = [*commands[name], steps, *chosen.override, *check]
            if not finished.contain(name, words) and run_command(rows, name, words, chosen):
                finished.add(name, words)


if __name__ == "__main__":
    main()
