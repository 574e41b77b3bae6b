"""Inputs that a new user gets wrong, with the exit code and the words that the answer must have."""

import json
import os
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROWS = '{"problem": "1 + 1?", "solution": "#### 2"}\n' * 4

REWARDS = """
import re
import time

def ok(prompt, text):
    return float(len(text))

def one_argument(text):
    return 1.0

def hang(prompt, text):
    time.sleep(3600)

def backtrack(prompt, text):
    re.match(r"(a+)+$", "a" * 60 + "b")  # takes years, and keeps the GIL

def leave(prompt, text):
    raise SystemExit(1)

def nothing(prompt, text):
    return None

def not_a_number(prompt, text):
    return float("nan")

def text(prompt, text):
    return "1.0"

def fail(prompt, text):
    return {}["key"]
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A wrong input, or an unusual one that must be accepted."""

    name: str
    arguments: tuple[str, ...] = ()
    """Settings and flags in addition to the usual ones."""
    is_bare: bool = False
    """True if there are no other arguments."""
    rows: str | bytes | None = ROWS
    """Content of the data file; None leaves it out."""
    prepare: Callable[[Path], object] | None = None
    """Changes the model folder, next to which the other files are; its result is kept meanwhile."""
    needs_run: bool = False
    """True if the folder `out` has a finished run of two steps."""
    first: tuple[str, ...] | None = None
    """Arguments of a run that ends before, whatever its exit code."""
    concurrent: tuple[str, ...] | None = None
    """Arguments of a run that is started before and still runs."""
    needs_root: bool = False
    """True if `prepare` needs root."""
    mode: str = "--check"
    """`--check`, or empty for a run."""
    before: str
    """Message and exit code of the audited version, or "not tried"."""
    exit_code: int = 2
    expects: str
    """Text that the output must have."""


def _cut(name: str) -> Callable[[Path], object]:
    return lambda folder: os.truncate(folder / name, 100)


def _remove(*patterns: str) -> Callable[[Path], object]:
    def remove(folder: Path) -> None:
        for pattern in patterns:
            for path in folder.glob(pattern):
                path.unlink()

    return remove


def write_file(name: str, content: str) -> Callable[[Path], object]:
    """Write a file; its name is relative to the model folder."""
    return lambda folder: (folder / name).write_text(content)


def _configure(**fields: object) -> Callable[[Path], object]:
    def configure(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return configure


def _listen(folder: Path) -> socket.socket:
    """Occupy the port of the case."""
    taken = socket.create_server(("127.0.0.1", PORT))
    taken.listen()
    return taken


def _mount_small_disk(folder: Path) -> None:
    out = folder.parent / "out"
    out.mkdir()
    # Needs root; the program unmounts it.
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(out)], check=True)


def _empty_checkpoint_file(folder: Path) -> None:
    files = (folder.parent / "out/checkpoints").rglob("*.distcp")
    os.truncate(max(files, key=lambda path: path.stat().st_size), 0)


PORT = 47591
WEIGHTS = "model.safetensors"
GOOD = "good, 2"
GOOD_LATE = "good, 1, in the run"
CHECKED = "OK with --check; good, 1, in the run"
NEW = "not tried"
TRACEBACK = "62 lines of traceback, no file name, 1"

SETTINGS = (
    Case(
        name="no arguments",
        is_bare=True,
        mode="",
        expects="experiment=quickstart",
        before="error without a hint at experiment=quickstart, 2",
    ),
    Case(
        name="unknown experiment",
        arguments=("experiment=quickstrat",),
        is_bare=True,
        expects="there is no choice quickstrat of the group experiment",
        before=NEW,
    ),
    Case(
        name="unknown key",
        arguments=("algorithm.group_sise=4",),
        expects="did you mean algorithm.group_size?",
        before=GOOD,
    ),
    Case(name="unknown group", arguments=("algorithm=grop",), expects="choose one of", before=GOOD),
    Case(
        name="text for an integer",
        arguments=("run.total_steps=many",),
        expects="run.total_steps is 'many', but must be",
        before=GOOD,
    ),
    Case(
        name="1.5 for an integer",
        arguments=("algorithm.group_size=1.5",),
        expects="algorithm.group_size is 1.5, but must be",
        before=GOOD,
    ),
    Case(
        name="misspelled flag", arguments=("--chekc",), expects="did you mean --check?", before=GOOD
    ),
    Case(
        name="--version",
        arguments=("--version",),
        is_bare=True,
        mode="",
        exit_code=0,
        expects="temper-train 0.",
        before="unknown flag, 2",
    ),
    Case(
        name="help of an unknown group",
        arguments=("--help", "nope"),
        is_bare=True,
        mode="",
        expects="nope",
        before="768 lines, whatever the group, 0",
    ),
    Case(
        name="negative learning rate",
        arguments=("actor.engine.optimizer.lr=-1e-3",),
        expects="optimizer.lr is -0.001, but must be at least 0",
        before="terse, 2",
    ),
    Case(
        name="learning rate 0",
        arguments=("actor.engine.optimizer.lr=0",),
        exit_code=0,
        expects="so its weights will not change: set it above 0",
        before="no word, 0",
    ),
    Case(
        name="group of 0",
        arguments=("algorithm.group_size=0",),
        expects="algorithm.group_size is 0, but must be at least 1",
        before=GOOD,
    ),
    Case(
        name="group of 1",
        arguments=("algorithm.group_size=1",),
        expects="algorithm.group_size is 1",
        before=GOOD,
    ),
    Case(
        name="5 mini-batches of 4 prompts",
        arguments=("batching.num_mini_batches=5",),
        expects="batching.num_mini_batches is 5",
        before=GOOD,
    ),
    Case(
        name="micro-batch shorter than a completion",
        arguments=("batching.max_tokens=4",),
        expects="batching.max_tokens is 4",
        before=GOOD,
    ),
    Case(
        name="0 steps", arguments=("run.total_steps=0",), expects="must be at least 1", before=GOOD
    ),
    Case(
        name="two workers in one process",
        arguments=("actor.num_workers=2",),
        expects="use ray",
        before=GOOD,
    ),
    Case(
        name="CUDA on a host without it",
        arguments=("actor.engine.device=cuda",),
        expects="use device auto or cpu",
        before="good, 1 to 2",
    ),
    Case(
        name="tracker that is not installed",
        arguments=("run.trackers=[wandb]",),
        expects="pip install",
        before=GOOD,
    ),
    Case(
        name="vLLM that is not installed",
        arguments=("rollout=vllm",),
        mode="",
        expects="vLLM is not installed here",
        before=GOOD,
    ),
    Case(
        name="port in use",
        arguments=(f"run.prometheus_port={PORT}", "run.prometheus_address=127.0.0.1"),
        prepare=_listen,
        expects="Choose a free port",
        before=GOOD,
    ),
)

DATA = (
    Case(name="data file missing", rows=None, expects="which is not a file", before=GOOD),
    Case(
        name="data file empty",
        rows="",
        expects="which has no rows: give files with rows",
        before="good, 1, after 6 to 12 s",
    ),
    Case(
        name="blank data file",
        rows="\n\n",
        expects="which has no rows: give files with rows",
        before="good, 1, after 6 to 12 s",
    ),
    Case(
        name="broken third line",
        rows=ROWS[:88] + "{broken\n",
        expects="train.jsonl:3: not a JSON object",
        before="OK with --check; 1 in the run",
    ),
    Case(
        name="broken line 150, run",
        rows=ROWS * 37 + "\n{broken\n",
        mode="",
        exit_code=1,
        expects="train.jsonl:150: not a JSON object",
        before=GOOD_LATE,
    ),
    Case(
        name="JSON array",
        rows='[{"problem": "?", "solution": "1"}]',
        expects="expected an object with fields",
        before=GOOD_LATE,
    ),
    Case(
        name="rows are lists",
        rows='["1 + 1?", "2"]\n',
        expects="expected an object with fields",
        before=GOOD_LATE,
    ),
    Case(
        name="second row lacks a field",
        rows=ROWS[:44] + '{"problem": "2 + 2?"}\n',
        expects="train.jsonl:2: there is no field 'solution'",
        before=GOOD_LATE,
    ),
    Case(
        name="Latin-1",
        rows='{"problem": "é?", "solution": "#### 1"}\n'.encode("latin-1"),
        expects="is not UTF-8 text",
        before=GOOD_LATE,
    ),
    Case(
        name="byte order mark",
        rows=b"\xef\xbb\xbf" + ROWS.encode(),
        exit_code=0,
        expects="OK",
        before="refused, jargon of the codec, 1",
    ),
    Case(
        name="gzip file",
        rows=bytes.fromhex("1f8b0800") + bytes(60),
        expects="train.jsonl",
        before=NEW,
    ),
    Case(
        name="integer answer",
        rows='{"problem": "3 + 4?", "solution": 7}\n',
        exit_code=0,
        expects="OK",
        before="must be text, no remedy, 1",
    ),
    Case(
        name="null answer",
        rows='{"problem": "3 + 4?", "solution": null}\n',
        expects="correct or remove the row",
        before="must be text, no remedy, 1",
    ),
    Case(
        name="answer 0.5",
        rows='{"problem": "1 / 2?", "solution": 0.5}\n',
        expects="correct or remove the row",
        before=NEW,
    ),
    Case(
        name="wrong prompt_key",
        arguments=("data.train.prompt_key=prompt",),
        expects="set prompt_key",
        before="OK with --check; 1 in the run",
    ),
    Case(
        name="words that the tokenizer lacks",
        rows='{"problem": "zzz qqq", "solution": "1"}\n',
        expects="the tokenizer knows none of its words",
        before='"has no tokens", no cause, 1',
    ),
    Case(
        name="prompt above the limit",
        arguments=("data.max_prompt_tokens=1",),
        expects="data.max_prompt_tokens",
        before=NEW,
    ),
    Case(
        name="messages without a chat template",
        rows='{"problem": [{"role": "user", "content": "1 + 1?"}], "solution": "2"}\n',
        expects="set data.chat_template",
        before=NEW,
    ),
    Case(
        name="= in an unquoted path",
        arguments=("data.train.paths=[k=v.jsonl]",),
        expects="write 'data.train.paths=[\"k=v.jsonl\"]'",
        before="parser jargon, but says to quote, 2",
    ),
    Case(
        name="{ in an unquoted path",
        arguments=("data.train.paths=[a{b.jsonl]",),
        expects="write 'data.train.paths=[\"a{b.jsonl\"]'",
        before="parser jargon, but says to quote, 2",
    ),
    Case(
        name="spaces and Unicode in a quoted path",
        rows=None,
        arguments=("data.train.paths=['my dätä.jsonl']",),
        exit_code=0,
        expects="OK",
        prepare=write_file("../my dätä.jsonl", ROWS),
        before="OK, 0",
    ),
)

REWARD_CASES = (
    Case(
        name="reward misspelled",
        arguments=("reward.function=gsm8k_strikt",),
        expects="did you mean 'gsm8k_strict'?",
        before=GOOD,
    ),
    Case(
        name="module of a reward missing",
        arguments=("reward.function=no_rewards:ok",),
        expects="PYTHONPATH",
        before=GOOD,
    ),
    Case(
        name="function of a reward missing",
        arguments=("reward.function=my_rewards:okay",),
        expects="Did you mean 'ok'?",
        before=GOOD,
    ),
    Case(
        name="syntax error in a reward's module",
        arguments=("reward.function=broken:ok",),
        prepare=write_file("../broken.py", "def ok(:\n"),
        expects="SyntaxError",
        before=GOOD,
    ),
    Case(
        name="reward with one parameter",
        arguments=("reward.function=my_rewards:one_argument",),
        expects="cannot be called with a prompt, a text",
        before=GOOD,
    ),
    Case(
        name="unknown reward argument",
        arguments=("+reward.arguments.scale=2",),
        expects="cannot be called with a prompt, a text",
        before=NEW,
    ),
    Case(
        name="reward returns None",
        arguments=("reward.function=my_rewards:nothing",),
        expects="returned None",
        before=CHECKED,
    ),
    Case(
        name="reward returns NaN",
        arguments=("reward.function=my_rewards:not_a_number",),
        expects="returned nan",
        before=CHECKED,
    ),
    Case(
        name="reward returns text",
        arguments=("reward.function=my_rewards:text",),
        expects="returned '1.0' (str)",
        before=CHECKED,
    ),
    Case(
        name="KeyError in a reward",
        arguments=("reward.function=my_rewards:fail",),
        expects="KeyError: 'key'",
        before=CHECKED,
    ),
    Case(
        name="SystemExit in a reward",
        arguments=("reward.function=my_rewards:leave",),
        expects="SystemExit: 1",
        before="called a timeout, 1",
    ),
    Case(
        name="SystemExit in a reward, run",
        arguments=("reward.function=my_rewards:leave",),
        mode="",
        exit_code=1,
        expects="SystemExit: 1",
        before="called a timeout, 1",
    ),
    Case(
        name="hanging reward",
        arguments=("reward.function=my_rewards:hang", "reward.timeout_s=3"),
        expects="took longer than reward.timeout_s = 3",
        before="OK with --check, 0",
    ),
    Case(
        name="hanging reward, run",
        mode="",
        exit_code=1,
        arguments=("reward.function=my_rewards:hang", "reward.timeout_s=3"),
        expects="took longer than reward.timeout_s = 3",
        before="not over after 90 s, no line",
    ),
    Case(
        name="hanging reward in a worker process, run",
        mode="",
        exit_code=1,
        arguments=("reward.function=my_rewards:hang", "reward.timeout_s=3", "reward.num_workers=1"),
        expects="took longer than reward.timeout_s = 3",
        before="not over after 90 s, no line",
    ),
    Case(
        name="reward that holds the GIL",
        arguments=("reward.function=my_rewards:backtrack", "reward.timeout_s=3"),
        expects="It never released Python's global lock (GIL)",
        before="not over after 9 min",
    ),
    Case(
        name="reward that holds the GIL, run",
        mode="",
        exit_code=1,
        arguments=("reward.function=my_rewards:backtrack", "reward.timeout_s=3"),
        expects="has held Python's global lock (GIL) for 6 s",
        before="not over after 9 min, no line",
    ),
)

MODELS = (
    Case(
        name="model folder missing",
        arguments=("actor.engine.model.path=gone",),
        expects="correct the path",
        before=GOOD,
    ),
    Case(name="model folder empty", prepare=_remove("*"), expects="no config.json", before=GOOD),
    Case(
        name="model path is a file",
        arguments=("actor.engine.model.path=train.jsonl",),
        expects="give the folder of a Hugging Face model",
        before=NEW,
    ),
    Case(
        name="name on the Hub, no network",
        arguments=("actor.engine.model.path=Qwen/Qwen2.5-0.5B",),
        expects="run hf download Qwen/Qwen2.5-0.5B",
        before="no word of the Hub, 2",
    ),
    Case(
        name="model without tokenizer",
        prepare=_remove("tokenizer*", "vocab*"),
        expects="which has no tokenizer files",
        before="wrong cause, 1",
    ),
    Case(
        name="tokenizer truncated", prepare=_cut("tokenizer.json"), expects="tokenizer", before=NEW
    ),
    Case(
        name="model without weights",
        prepare=_remove(WEIGHTS),
        expects="has no weights",
        before="wrong cause, 1",
    ),
    Case(
        name="truncated weights",
        prepare=_cut(WEIGHTS),
        expects="is truncated: copy or download",
        before=TRACEBACK,
    ),
    Case(
        name="empty weights",
        prepare=write_file(WEIGHTS, ""),
        expects="is empty: copy or download",
        before=TRACEBACK,
    ),
    Case(
        name="last byte of the weights missing",
        prepare=lambda folder: os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size - 1),
        expects="by its header: copy it again",
        before=TRACEBACK,
    ),
    Case(
        name="file of an index missing",
        prepare=write_file(f"{WEIGHTS}.index.json", '{"weight_map": {"a": "gone.safetensors"}}'),
        expects="download the missing files",
        before=NEW,
    ),
    Case(
        name="weights of another shape",
        prepare=_configure(intermediate_size=256),
        expects="12 of another shape",
        before="OK with --check; traceback, 1, in the run",
    ),
    Case(
        name="weights of another shape, run",
        prepare=_configure(intermediate_size=256),
        mode="",
        exit_code=1,
        expects="12 of another shape",
        before="traceback without names, 1",
    ),
    Case(
        name="weights lack a layer",
        prepare=_configure(num_hidden_layers=5, layer_types=["full_attention"] * 5),
        expects="12 missing, such as model.layers.4.",
        before=CHECKED,
    ),
    Case(
        name="config.json is no JSON",
        prepare=write_file("config.json", "{"),
        expects="copy or download it again",
        before=GOOD,
    ),
    Case(
        name="unknown model_type",
        prepare=_configure(model_type="qwen99"),
        expects="which the installed transformers does not know",
        before="good, 1 to 2",
    ),
    Case(
        name="multimodal model",
        prepare=_configure(vision_config={"depth": 2}),
        expects="or of a text model.",
        before=NEW,
    ),
)

FOLDERS = (
    Case(
        name="run.dir is a file",
        arguments=("run.dir=train.jsonl",),
        expects="choose another run.dir",
        before=GOOD,
    ),
    Case(
        name="run.dir cannot be written",
        arguments=("run.dir=/proc/out",),
        expects="run.dir",
        before=GOOD,
    ),
    Case(
        name="resume from a missing folder",
        arguments=("run.resume=gone",),
        expects="use never, auto, or the",
        before=GOOD,
    ),
    Case(
        name="run.dir holds a run",
        needs_run=True,
        expects="continue it with run.resume=auto",
        before=GOOD,
    ),
    Case(
        name="corrected command after a failed start",
        first=("reward.function=my_rewards:fail",),
        mode="",
        exit_code=0,
        expects="done in",
        before="refused: already holds a run, 2",
    ),
    Case(
        name="second process in the same folder",
        arguments=("run.resume=auto",),
        concurrent=("run.total_steps=5000",),
        mode="",
        expects="run.lock",
        before="accepted: both write the same run, 0",
    ),
    Case(
        name="resume with another learning rate",
        needs_run=True,
        mode="",
        exit_code=0,
        arguments=("run.resume=auto", "run.total_steps=3", "actor.engine.optimizer.lr=2e-3"),
        expects="actor.engine.optimizer.lr",
        before='"differs", without the key, 0',
    ),
    Case(
        name="resume with another model path",
        needs_run=True,
        mode="",
        exit_code=0,
        arguments=("run.resume=auto", "run.total_steps=3", "actor.engine.model.path=./model/"),
        expects="actor.engine.model.path",
        before='"differs", without the key, 0',
    ),
    Case(
        name="resume after the last step",
        needs_run=True,
        arguments=("run.resume=auto", "run.total_steps=1"),
        expects="run.total_steps",
        before=NEW,
    ),
    Case(
        name="resume from an empty checkpoint file",
        needs_run=True,
        mode="",
        exit_code=2,
        arguments=("run.resume=out/checkpoints/step_00000002", "run.total_steps=3"),
        prepare=_empty_checkpoint_file,
        expects="0 bytes",
        before="good, 1",
    ),
    Case(
        name="disk full",
        mode="",
        exit_code=1,
        arguments=("run.save_every=1",),
        prepare=_mount_small_disk,
        needs_root=True,
        expects="of the step were written and",
        before="good, 1",
    ),
)

AUDITED_CASES = (*SETTINGS, *DATA, *REWARD_CASES, *MODELS, *FOLDERS)
