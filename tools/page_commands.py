"""Check the commands on a page: run, compose or parse each as far as that is cheap.

The input is the shell blocks of a page as one program. Bash parses it with no command on its path,
so that quotes, variables and line continuations mean what they mean to a reader. The commands that
it would have started are then checked in order (tools/command_rules.py), in a folder with the files
that pages ask their reader to have (`INPUTS`). Commands in `NOT_RUN` are skipped for the given
reason; an unknown command is an error.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tools.command_rules import (
    EXAMPLE_OVERRIDES,
    check_kit,
    check_migrate,
    check_nox,
    check_pip,
    check_python,
    check_ray_job,
    check_train,
)
from tools.scenarios import OLD_CONFIG

LIBRARIES = ("gymnasium", "mcp", "openenv", "verifiers")
"""Libraries of extras that the environment of the checks lacks."""

NOT_RUN = {
    "apt-get": "installs packages of the reader's system; .ci/run installs bubblewrap with it",
    "hf download": "downloads from the Hugging Face Hub",
    "kubectl": "changes a cluster; tools/tests/test_examples.py checks the objects' commands",
    "sbatch": "submits a job; tools/tests/test_examples.py checks the script's commands",
    "git": "changes the reader's repository; tests of tools/release.py use temporary ones",
    "ray get-auth-token": "writes ~/.ray/auth_token, and prints it",
    "chmod": "changes the permissions of the file that the command before it writes",
    "ray start": "starts a cluster; nightly tests of packages/trainer start two nodes",
    "vllm serve": "starts a server, in an environment with vLLM",
    "openssl rand": "makes a secret, which the next commands read",
    "uvicorn": "starts a server of another project",
    "tee": "keeps the output of the command before it, which is checked",
}
"""Beginnings of commands that are not checked, each with the reason."""

RULES = {
    r"temper-train": check_train,
    r"temper-migrate": check_migrate,
    r"python3?": check_python,
    r"pytest": check_kit,
    r"nox": check_nox,
    r"pip": check_pip,
    r"ray": check_ray_job,
}
"""Maps a pattern of a command's first word to the function that returns its error, if any."""

_OLD_SCRIPT = """\
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\
    data.train_files=train.parquet data.val_files=test.parquet data.train_batch_size=64 \\
    actor_rollout_ref.model.path=$MODEL_PATH \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=4 \\
    trainer.nnodes=1 trainer.n_gpus_per_node=1 trainer.total_epochs=1 trainer.logger=console "$@"
"""
_TEXTS = (
    "question",
    "answer",
    "problem",
    "solution",
    "question_with_solution",
    "prompt",
    "chosen",
    "kind",
)
_MESSAGES = [{"role": role, "content": "1"} for role in ("user", "assistant")]
_MORE = {
    "rejected": "2",
    "data_source": "openai/gsm8k",  # chooses the reward of verl's projects
    "subject": "math",
    "level": 3,
    "messages": _MESSAGES,
    "reward_model": {"ground_truth": "1"},
}
_ROWS = f"{json.dumps(dict.fromkeys(_TEXTS, '1') | _MORE)}\n" * 64
"""Rows of a data file; a run of epochs needs those of a step."""
_TINY_CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_WORDS = ("<unk>", "<pad>", "<eos>", "1", "2")
_TOKENIZER = {
    "tokenizer.json": Tokenizer(
        WordLevel({word: index for index, word in enumerate(_WORDS)}, unk_token="<unk>")
    ).to_str(),
    "tokenizer_config.json": json.dumps(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": "<pad>",
            "eos_token": "<eos>",
        }
    ),
    "chat_template.jinja": "{% for message in messages %}{{ message.content }}<eos>{% endfor %}",
}


def _make_weights() -> str:
    """Make a safetensors file of zeros with the names and shapes of the model, as text."""
    shapes = {"model.embed_tokens": (64, 32), "model.norm": (32,), "lm_head": (64, 32)}
    for layer in ("model.layers.0", "model.layers.1"):
        shapes |= {
            f"{layer}.{norm}": (32,) for norm in ("input_layernorm", "post_attention_layernorm")
        }
        for name, size in (("q_proj", 32), ("k_proj", 16), ("v_proj", 16)):
            shapes[f"{layer}.self_attn.{name}"] = (size, 32)
        shapes[f"{layer}.self_attn.o_proj"] = (32, 32)
        shapes |= {f"{layer}.mlp.{name}": (48, 32) for name in ("gate_proj", "up_proj")}
        shapes[f"{layer}.mlp.down_proj"] = (32, 48)
    named = {f"{name}.weight": shape for name, shape in shapes.items()}
    for name, shape in shapes.items():
        if name.endswith(("q_proj", "k_proj", "v_proj")):
            named[f"{name}.bias"] = shape[:1]
    header, end = {}, 0
    for name, shape in named.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header)
    # A multiple of 256, so that the bytes of the length in front are characters.
    text += -len(text) % 256 * " "
    return len(text).to_bytes(8, "little").decode("ascii") + text + end * "\0"


_MODEL = {
    "config.json": json.dumps(_TINY_CONFIG),
    **_TOKENIZER,
    "model.safetensors": _make_weights(),
}
"""The files of a model directory that `temper-train --check` reads."""
_MODELS = (
    "DIR",
    "Qwen2.5-0.5B-Instruct",
    "Qwen3-8B",
    # Names on the Hub, which a folder of that name replaces.
    "Qwen/Qwen2.5-0.5B-Instruct",
    "Qwen/Qwen3-8B",
    "student",
    "teacher_of_math",
    "teacher_of_code",
)
_RESULTS = ("runs/gsm8k_sft/huggingface", "runs/judge/huggingface", "warm/warm_start/huggingface")

INPUTS = {
    **dict.fromkeys(
        ("train.jsonl", "test.jsonl", "mine.jsonl", "pairs.jsonl", "test_pairs.jsonl"), _ROWS
    ),
    "labeled.jsonl": "".join(
        json.dumps({"prompt": "1", "completion": "2", "label": label}) + "\n"
        for label in (True, False)
    ),
    **dict.fromkeys(("train.parquet", "test.parquet"), _ROWS),
    **{
        f"{folder}/{name}": text
        for folder in (*_MODELS, *_RESULTS)
        for name, text in _MODEL.items()
    },
    # The same page creates these runs and then uses their models. Without the marker, the command
    # that creates one would be refused.
    **{f"{run}/.untrained": "" for run in ("runs/gsm8k_sft", "runs/judge", "warm")},
    **{f"warm/tokenizer/{name}": text for name, text in _TOKENIZER.items()},
    **dict.fromkeys(("old/run_grpo.sh", "run_grpo.sh", "examples/other.sh"), _OLD_SCRIPT),
    **dict.fromkeys(("old/rewards.py", "src/rewards.py"), "from verl import DataProto\n"),
    "my_run.yaml": OLD_CONFIG.replace("path: model", "path: DIR"),
}
"""Files that pages ask their reader to have.

They are data, models as far as checks read them, and the project of an older system.
"""

PAGE_MODULES = {"README.md": "my_reward.py"} | {
    f"docs/how-to/{page}.md": f"my_{module}.py"
    for page, module in (
        ("reward", "rewards"),
        ("algorithm", "algorithm"),
        ("environment", "environment"),
        ("agent", "agent"),
    )
}
"""Pages whose Python blocks the reader saves as a module, with its file name."""

PAGES_WITH_CHECKPOINTS = ("docs/migration/checkpoints.md", "packages/legacy-shim/README.md")
"""Pages whose reader has `checkpoints` of an old run.

Their commands use these checkpoints, and their Python blocks run in the folder where the commands
wrote their files.
"""


def _write_gsm8k(folder: Path) -> None:
    """Write the files of GSM8K as the Hub has them, with one row each."""
    (folder / "gsm8k" / "main").mkdir(parents=True)
    for split in ("train", "test"):
        rows = pa.Table.from_pylist([{"question": "1 + 1?", "answer": "#### 2"}])
        parquet.write_table(rows, folder / "gsm8k" / "main" / f"{split}-00000-of-00001.parquet")


def _write_trained_model(folder: Path) -> None:
    """Write the model directory of a run `runs/mine`, with weights."""
    # Imports torch, which the other pages do not need here.
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = folder / "runs" / "mine" / "huggingface"
    config = {key: value for key, value in _TINY_CONFIG.items() if key != "model_type"}
    Qwen2ForCausalLM(Qwen2Config(**config)).save_pretrained(model)
    write_inputs(model, _TOKENIZER)


PYTHON_INPUTS: Mapping[str, Callable[[Path], None]] = {
    "docs/how-to/gpu.md": _write_gsm8k,
    "docs/how-to/evaluate-and-export.md": _write_trained_model,
}
"""Pages whose Python blocks read files that the commands above them would have written.

The function writes them into a folder, in which the blocks run.
"""

# On a single line before the page's first line, so that line numbers stay correct.
_RECORDER = (
    "command_not_found_handle() { "
    """printf '%s\\0' "${BASH_LINENO[0]}" "$#" "$@" >> "$RECORDED"; }; """
    """rollout-env/bin/pip() { command_not_found_handle pip "$@"; }; source() { :; }; """
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command that bash would have started."""

    line: int
    """Line number in the page."""
    words: tuple[str, ...]


def check_commands(program: str, *, page: str, code: str, folder: Path) -> list[str]:
    """Check the commands of a page and return one sentence for each error.

    Args:
        program: The page's shell blocks, with each line at its line number in the page.
        page: Path of the page, relative to the repository.
        code: The page's Python blocks, for `PAGE_MODULES`.
        folder: An empty folder.
    """
    write_inputs(folder, {**INPUTS, PAGE_MODULES[page]: code} if page in PAGE_MODULES else INPUTS)
    if page in PAGES_WITH_CHECKPOINTS:
        shutil.copytree(_old_checkpoints().name, folder / "checkpoints", dirs_exist_ok=True)
    try:
        commands = record_commands(program, folder=folder)
    except ValueError as error:
        return [f"{page}: bash cannot parse the shell blocks: {error}"]
    return [
        f"{page}:{command.line}: `{' '.join(command.words)[:100]}`: {fault}"
        for command in commands
        if (fault := check_command(command.words, folder=folder))
    ]


def check_settings(text: str, *, folder: Path) -> str:
    """Check a YAML block as a `temper-train` configuration; return its error, if any.

    A block without `defaults` is checked as an excerpt of the reader's own configuration.
    """
    write_inputs(folder, INPUTS)
    is_complete = re.search(r"(?m)^defaults:", text) is not None
    (folder / "settings.yaml").write_text(
        text + "\n" if is_complete else f"defaults: [temper, _self_]\n{text}\n"
    )
    error = check_train(
        (
            "temper-train",
            "--config-dir",
            ".",
            "--config-name",
            "settings",
            *(() if is_complete else EXAMPLE_OVERRIDES),
        ),
        folder,
    )
    # Checked after the settings themselves; `nox -s adapters` has these libraries.
    names = "|".join(LIBRARIES)
    is_absent = re.search(rf"needs the ({names}) library|No module named '({names})", error)
    return "" if is_absent else error


def write_inputs(folder: Path, inputs: Mapping[str, str]) -> None:
    """Write these files to a folder."""
    for name, text in inputs.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            rows = [json.loads(line) for line in text.splitlines()]
            parquet.write_table(pa.Table.from_pylist(rows), folder / name)
        else:
            (folder / name).write_text(text)


@cache
def _old_checkpoints() -> tempfile.TemporaryDirectory[str]:
    """Return a folder with an old run's checkpoints, which is created only once."""
    folder = tempfile.TemporaryDirectory(prefix="temper-docs-checkpoints-")
    root = Path(__file__).resolve().parent.parent
    subprocess.run(
        [sys.executable, "-m", "tools.old_checkpoint", folder.name], cwd=root, check=True
    )
    return folder


def record_commands(program: str, *, folder: Path, arguments: Sequence[str] = ()) -> list[Command]:
    """Return the commands that bash would have started, by line.

    Args:
        program: The bash program.
        folder: Working directory.
        arguments: Arguments of the program.

    Raises:
        ValueError: If bash reports an error, such as an open quote.
    """
    script, recorded = folder / ".program.sh", folder / ".recorded"
    script.write_text(_RECORDER + program)
    recorded.write_text("")
    # No command is found, so bash calls `command_not_found_handle` for each, which records it.
    variables = {"PATH": "/nonexistent", "RECORDED": str(recorded), "MODEL_PATH": "DIR"}
    command = ["/bin/bash", "--norc", str(script), *arguments]
    done = subprocess.run(
        command,
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode or done.stderr:
        raise ValueError(
            done.stderr.replace(f"{script}: ", "").strip() or f"exit status {done.returncode}"
        )
    fields = iter(recorded.read_text().split("\0")[:-1])
    commands = [
        Command(line=int(line), words=tuple(next(fields) for _ in range(int(next(fields)))))
        for line in fields
    ]
    return sorted(commands, key=lambda each: each.line)


def check_command(words: Sequence[str], *, folder: Path) -> str:
    """Return the error of a command; empty if it is correct or in `NOT_RUN`."""
    if any(tuple(words[: len(known.split())]) == tuple(known.split()) for known in NOT_RUN):
        return ""
    if words[0] == "bash":
        commands = record_commands(
            (folder / words[1]).read_text(), folder=folder, arguments=words[2:]
        )
        return "; ".join(
            filter(None, (check_command(command.words, folder=folder) for command in commands))
        )
    for known, rule in RULES.items():
        if re.fullmatch(known, words[0]):
            return rule(tuple(words), folder)
    return (
        "no rule checks this command: add one to RULES, or a reason to NOT_RUN, "
        "both in tools/page_commands.py"
    )
