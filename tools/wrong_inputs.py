"""Try inputs that a new user gets wrong, and tabulate exit code, CPU time and message.

    python tools/wrong_inputs.py RESULTS.json [--only NAME]

Each result is written at once, and cases that are in the file already are skipped, so that an
interrupted campaign continues. A case with a hanging or failing reward runs; the others are checked
with `--check`, which also every start does.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 600
ROWS = '{"problem": "1 + 1?", "solution": "#### 2"}\n' * 4

REWARDS = """
import time

def ok(prompt, text):
    return float(len(text))

def hang(prompt, text):
    time.sleep(3600)

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
    """A wrong input."""

    name: str
    arguments: tuple[str, ...] = ()
    rows: str | bytes | None = ROWS
    """Content of the data file; None leaves it out."""
    prepare: Callable[[Path], object] | None = None
    """Damages the model folder."""
    mode: str = "--check"
    """`--check`, or empty for a run."""
    before: str = ""
    """Message and exit code before these checks existed."""


def _cut(path: Path) -> Callable[[Path], object]:
    def cut(folder: Path) -> None:
        os.truncate(folder / path, 100)

    return cut


def _remove(*patterns: str) -> Callable[[Path], object]:
    def remove(folder: Path) -> None:
        for pattern in patterns:
            for path in folder.glob(pattern):
                path.unlink()

    return remove


WEIGHTS = Path("model.safetensors")
GOOD = "good sentence, exit code 2"
CASES = (
    Case(name="unknown key", arguments=("algorithm.group_sise=4",), before=GOOD),
    Case(name="unknown group", arguments=("algorithm=grop",), before=GOOD),
    Case(name="1.5 for an integer", arguments=("algorithm.group_size=1.5",), before=GOOD),
    Case(name="unknown flag", arguments=("--chekc",), before=GOOD),
    Case(
        name="negative learning rate",
        arguments=("actor.engine.optimizer.lr=-1e-3",),
        before="terse, 2",
    ),
    Case(name="learning rate 0", arguments=("actor.engine.optimizer.lr=0",), before="no word, 0"),
    Case(name="group of 0", arguments=("algorithm.group_size=0",), before=GOOD),
    Case(name="0 steps", arguments=("run.total_steps=0",), before=GOOD),
    Case(name="two workers in one process", arguments=("actor.num_workers=2",), before=GOOD),
    Case(name="data file missing", rows=None, before=GOOD),
    Case(name="data file empty", rows="", before="good, 1, after 6 to 12 s"),
    Case(name="blank data file", rows="\n\n", before="good, 1, after 6 to 12 s"),
    Case(
        name="broken third line",
        rows=ROWS[:90] + "{broken\n",
        before="OK with --check; 1 in the run",
    ),
    Case(
        name="JSON array", rows='[{"problem": "?", "solution": "1"}]', before="good, 1, in the run"
    ),
    Case(
        name="Latin-1",
        rows='{"problem": "é?", "solution": "#### 1"}\n'.encode("latin-1"),
        before="good, 1, in the run",
    ),
    Case(
        name="byte order mark",
        rows=b"\xef\xbb\xbf" + ROWS.encode(),
        before="refused, jargon of the codec, 1",
    ),
    Case(
        name="integer answer",
        rows='{"problem": "3 + 4?", "solution": 7}\n',
        before="must be text, no remedy, 1",
    ),
    Case(
        name="null answer",
        rows='{"problem": "3 + 4?", "solution": null}\n',
        before="must be text, no remedy, 1",
    ),
    Case(
        name="wrong prompt_key",
        arguments=("data.train.prompt_key=prompt",),
        before="OK with --check; 1 in the run",
    ),
    Case(
        name="name of a reward misspelled", arguments=("reward.function=gsm8k_strikt",), before=GOOD
    ),
    Case(
        name="module of a reward missing", arguments=("reward.function=no_rewards:ok",), before=GOOD
    ),
    Case(
        name="function of a module missing",
        arguments=("reward.function=my_rewards:okay",),
        before=GOOD,
    ),
    Case(
        name="reward returns None",
        arguments=("reward.function=my_rewards:nothing",),
        before="OK with --check; good, 1, in the run",
    ),
    Case(
        name="reward returns NaN",
        arguments=("reward.function=my_rewards:not_a_number",),
        before="OK with --check; good, 1, in the run",
    ),
    Case(
        name="reward returns text",
        arguments=("reward.function=my_rewards:text",),
        before="OK with --check; good, 1, in the run",
    ),
    Case(
        name="KeyError in a reward",
        arguments=("reward.function=my_rewards:fail",),
        before="OK with --check; good, 1, in the run",
    ),
    Case(
        name="SystemExit in a reward",
        arguments=("reward.function=my_rewards:leave",),
        before="called a timeout, 1",
    ),
    Case(
        name="hanging reward, checked",
        arguments=("reward.function=my_rewards:hang", "reward.timeout_s=3"),
        before="OK with --check",
    ),
    Case(
        name="hanging reward, run",
        arguments=("reward.function=my_rewards:hang", "reward.timeout_s=3"),
        mode="",
        before="not over after 90 s, no line",
    ),
    Case(name="model folder missing", arguments=("actor.engine.model.path=gone",), before=GOOD),
    Case(
        name="name on the Hub, no network",
        arguments=("actor.engine.model.path=Qwen/Qwen2.5-0.5B",),
        before="no word of the Hub, 2",
    ),
    Case(
        name="model without tokenizer",
        prepare=_remove("tokenizer*", "vocab*"),
        before="wrong cause, 1",
    ),
    Case(
        name="model without weights", prepare=_remove("model.safetensors"), before="wrong cause, 1"
    ),
    Case(
        name="truncated weights",
        prepare=_cut(WEIGHTS),
        before="62 lines of traceback, no file name, 1",
    ),
    Case(
        name="empty weights",
        prepare=lambda folder: (folder / WEIGHTS).write_bytes(b""),
        before="62 lines of traceback, no file name, 1",
    ),
    Case(
        name="config.json is no JSON",
        prepare=lambda folder: (folder / "config.json").write_text("{"),
        before=GOOD,
    ),
    Case(
        name="CUDA on a host without one",
        arguments=("actor.engine.device=cuda",),
        before="good, 1 to 2",
    ),
    Case(name="run.dir is a file", arguments=("run.dir=train.jsonl",), before=GOOD),
    Case(name="resume from a missing folder", arguments=("run.resume=gone",), before=GOOD),
)


def run_case(case: Case, *, model: Path) -> dict[str, object]:
    """Run a case in a new folder; return exit code, times and the message."""
    with tempfile.TemporaryDirectory(prefix="wrong-input-") as name:
        folder = Path(name)
        (folder / "my_rewards.py").write_text(REWARDS)
        if case.rows is not None:
            data = case.rows.encode() if isinstance(case.rows, str) else case.rows
            (folder / "train.jsonl").write_bytes(data)
        subprocess.run(["cp", "-r", str(model), str(folder / "model")], check=True)
        if case.prepare is not None:
            case.prepare(folder / "model")
        settings = {
            "algorithm": "grpo",
            "actor.engine.model.path": "model",
            "actor.engine.precision.compute": "fp32",
            "data.train.paths": "[train.jsonl]",
            "data.train.prompt_key": "problem",
            "data.train.answer_key": "solution",
            "reward.function": "my_rewards:ok",
            "run.total_steps": "2",
            "batching.prompts_per_step": "4",
            "sampling.max_tokens": "8",
            "run.dir": "out",
        }
        others = []
        for argument in case.arguments:
            key, equals, value = argument.partition("=")
            if equals:
                settings[key] = value
            else:
                others.append(argument)
        command = [sys.executable, "-m", "temper_trainer", *others, *filter(None, [case.mode])]
        command += [f"{key}={value}" for key, value in settings.items()]
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        begin = time.monotonic()
        done = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        now = resource.getrusage(resource.RUSAGE_CHILDREN)
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        skipped = ("configuration error:", "usage:", "INFO:")
        lines = [line for line in lines if not line.startswith(skipped)]
        return {
            "before": case.before,
            "exit_code": done.returncode,
            "cpu_s": round(now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime, 1),
            "wall_s": round(time.monotonic() - begin, 1),
            "num_lines": len(lines),
            "message": (lines[0] if lines else "").replace(str(folder), "FOLDER")[:300],
        }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="folder that a quickstart left")
    parser.add_argument("--only", help="name of one case")
    options = parser.parse_args()
    known = json.loads(options.results.read_text()) if options.results.exists() else {}
    for case in CASES:
        if case.name in known or options.only not in (None, case.name):
            continue
        known[case.name] = run_case(case, model=options.model)
        options.results.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n")
        print(case.name, known[case.name], flush=True)
    print("| input | before | exit code | CPU s | message |\n|---|---|---|---|---|")
    for name, each in known.items():
        message = str(each["message"]).replace("|", "\\|")
        print(f"| {name} | {each['before']} | {each['exit_code']} | {each['cpu_s']} | {message} |")


if __name__ == "__main__":
    main()
