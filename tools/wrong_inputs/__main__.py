"""Try inputs that a new user gets wrong, and tabulate exit code, time and message.

    python -m tools.wrong_inputs [RESULTS.json] [--model FOLDER] [--only NAME] [--retry-wrong]

Each result is written at once, and an interrupted campaign continues. A complete one begins again,
unless `--retry-wrong` repeats its wrong cases. Most cases are tried with `--check`; the others are
short runs. The exit status is 1 if an answer is wrong.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from tools.wrong_inputs.cases import AUDITED_CASES, REWARDS, ROWS, Case
from tools.wrong_inputs.quickstart_cases import QUICKSTART_CASES
from tools.wrong_inputs.useless_settings import USELESS_SETTINGS

CASES = (*AUDITED_CASES, *QUICKSTART_CASES, *USELESS_SETTINGS)

RESULTS = Path(".temper") / "wrong_inputs.json"
TIMEOUT_S = 580
ENVIRONMENT = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
ERROR_PREFIXES = ("temper-train: error:", "DataError:", "RewardFailureError:", "WeightError:")


def build_command(
    arguments: tuple[str, ...], *, is_bare: bool = False, mode: str = ""
) -> list[str]:
    """Return the command of a case; its settings replace the usual ones."""
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
    flags = []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and not is_bare:
            settings[key] = value
        else:
            flags.append(argument)
    usual = [] if is_bare else [f"{key}={value}" for key, value in settings.items()]
    return [sys.executable, "-m", "temper_trainer", *flags, *filter(None, [mode]), *usual]


def write_inputs(folder: Path, *, model: Path, rows: str | bytes | None = ROWS) -> None:
    """Write model, data and rewards to a new folder."""
    (folder / "my_rewards.py").write_text(REWARDS)
    if rows is not None:
        (folder / "train.jsonl").write_bytes(rows.encode() if isinstance(rows, str) else rows)
    shutil.copytree(model, folder / "model")


def make_model() -> Path:
    """Train a tiny model for a moment; return its folder, which the end of the process removes."""
    folder = Path(tempfile.mkdtemp(prefix="wrong-input-model-"))
    atexit.register(shutil.rmtree, folder)
    short = ["warm_start.total_steps=2", "run.total_steps=1", "data.eval=null", "run.dir=out"]
    command = [sys.executable, "-m", "temper_trainer", "experiment=quickstart", *short]
    subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, check=True, capture_output=True, timeout=TIMEOUT_S
    )
    return folder / "out/huggingface"


@cache
def make_finished_run(model: Path) -> Path:
    """Return the folder of a run of two steps, which later cases copy."""
    folder = Path(tempfile.mkdtemp(prefix="wrong-input-run-"))
    atexit.register(shutil.rmtree, folder)
    write_inputs(folder, model=model)
    command = build_command(())
    subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, check=True, capture_output=True, timeout=TIMEOUT_S
    )
    return folder / "out"


@contextlib.contextmanager
def run_concurrently(case: Case, folder: Path) -> Iterator[None]:
    """Keep the other run of a case running in the context, from when it has taken its lock."""
    if case.concurrent is None:
        yield
        return
    command = build_command(case.concurrent)
    with subprocess.Popen(
        command, cwd=folder, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            while not (folder / "out/run.lock").exists() and process.poll() is None:
                time.sleep(0.2)
            yield
        finally:
            process.kill()


def run_case(case: Case, *, model: Path) -> dict[str, object]:
    """Run a case in a new folder; return exit code, times and the message."""
    with tempfile.TemporaryDirectory(prefix="wrong-input-") as name:
        folder = Path(name)
        write_inputs(folder, model=model, rows=case.rows)
        if case.needs_run:
            shutil.copytree(make_finished_run(model), folder / "out")
        kept = None if case.prepare is None else case.prepare(folder / "model")
        try:
            if case.first is not None:
                command = build_command(case.first)
                subprocess.run(
                    command,
                    cwd=folder,
                    env=ENVIRONMENT,
                    capture_output=True,
                    timeout=TIMEOUT_S,
                    check=False,
                )
            with run_concurrently(case, folder):
                return _measure(case, folder)
        finally:
            if hasattr(kept, "close"):
                kept.close()
            if os.path.ismount(folder / "out"):
                subprocess.run(["umount", str(folder / "out")], check=True)


def _measure(case: Case, folder: Path) -> dict[str, object]:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.monotonic()
    done = subprocess.run(
        build_command(case.arguments, is_bare=case.is_bare, mode=case.mode),
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    output = (done.stderr + done.stdout).replace(str(folder), "FOLDER")
    return {
        "before": case.before,
        "exit_code": done.returncode,
        "cpu_s": round(now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime, 1),
        "wall_s": round(time.monotonic() - begin, 1),
        "message": find_message(output, case),
        "output": output[-3000:],
    }


def is_correct(case: Case, result: Mapping[str, object]) -> bool:
    """Return True if a recorded result has the exit code and the words that the case expects."""
    return result["exit_code"] == case.exit_code and case.expects in str(result["output"])


def find_message(output: str, case: Case) -> str:
    """Return the line with the expected text, else the first line of the error, else the last."""
    lines = [line for line in output.splitlines() if line.strip()]
    starts = [i + 1 for i, line in enumerate(lines) if line == "configuration error:"]
    chosen = next((line for line in lines if case.expects in line), "")
    if not chosen:
        errors = [line for line in lines if line.startswith(ERROR_PREFIXES)]
        chosen = next(iter([*(lines[i] for i in starts), *errors, *lines[-1:]]), "")
    return chosen.strip()[:400]


def read_results(path: Path, *, may_begin_again: bool) -> dict[str, dict[str, object]]:
    """Return the results by case; none if all cases are there and the campaign may begin again."""
    known: dict[str, dict[str, object]] = json.loads(path.read_text()) if path.exists() else {}
    is_complete = all(case.name in known for case in CASES)
    return {} if is_complete and may_begin_again else known


def print_table(known: Mapping[str, Mapping[str, object]]) -> None:
    """Print the results as a table for docs/records/first_hour.md."""
    print("| input | before | exit code | CPU s | correct | message |\n|---|---|---|---|---|---|")
    for case in CASES:
        if case.name not in known:
            continue
        each = known[case.name]
        message = str(each["message"]).replace("|", "\\|")
        verdict = "yes" if is_correct(case, each) else "no"
        print(
            f"| {case.name} | {case.before} | {each['exit_code']} | {each['cpu_s']} | {verdict} "
            f"| {message} |"
        )


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path, nargs="?", default=RESULTS)
    parser.add_argument("--model", type=Path, help="folder that a quickstart left; else a new one")
    parser.add_argument("--only", help="name of one case")
    parser.add_argument("--retry-wrong", action="store_true", help="try wrong cases again")
    options = parser.parse_args()
    known = read_results(
        options.results, may_begin_again=not options.retry_wrong and options.only is None
    )
    chosen = [
        case
        for case in CASES
        if options.only in (None, case.name)
        and (
            case.name not in known
            or (options.retry_wrong and not is_correct(case, known[case.name]))
        )
    ]
    model = (options.model or make_model()).resolve() if chosen else Path()
    for case in chosen:
        if case.needs_root and os.geteuid() != 0:
            print(f"{case.name}: not tried, because it needs root to mount a file system")
            continue
        known[case.name] = run_case(case, model=model)
        options.results.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n")
        print(
            case.name, is_correct(case, known[case.name]), known[case.name]["message"], flush=True
        )
    print_table(known)
    wrong = [
        case.name for case in CASES if case.name in known and not is_correct(case, known[case.name])
    ]
    print(f"{len(known) - len(wrong)} of {len(known)} answers are correct")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
