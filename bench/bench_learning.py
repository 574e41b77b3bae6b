r"""Measure whether each algorithm learns: accuracy before and after 60 steps, with a curve.

    python bench/bench_learning.py [--methods NAME,...|all] [--out FOLDER] [--budget-s N]
        [--parallel N] [--rehearse] [--table]

All methods start from the warm start of the quickstart (seed 0), whose demonstrations are half
wrong. The bench tries a grid of learning rates on seed 0, and repeats the best one on two more
seeds. Every run is a `temper-train` process with one thread. Its row is appended to
FOLDER/rows.jsonl at its end, and runs that have a row are skipped, so the same command continues an
interrupted measurement. At its end, or at once with `--table`, it prints one line per method and
draws FOLDER/curves.png.

On-policy methods take one update per step. Methods whose loss differs from the policy gradient only
after the first update take four. Preference, SFT and reward-model methods train on right against
wrong solutions of the same problems; preference methods and the reward model are also evaluated on
500 held-out pairs. `--rehearse` runs every method once for two steps.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from temper_trainer.config.data import ArithmeticSource
from temper_trainer.data.arithmetic import generate_arithmetic_rows
from tools.gpu.engine_fsdp import write_entry_points
from tools.gpu.train_arithmetic import is_installed, write_pairs
from tools.gpu.workload import Rows

STEPS = 60
SEEDS = (0, 1, 2)
"""The learning rate is chosen on the first one."""
NUM_PROBLEMS = 500
"""Held-out problems of each evaluation."""
NUM_PAIRS = 8000
PAIRS_PER_STEP = 64
_REHEARSAL = ("warm_start.total_steps=15", "run.total_steps=2", "data.eval.max_rows=16")
CURVES = ("reward/mean", "preference/accuracy", "sft/nll")
"""Metrics that are drawn, by the kind of method; a run has the first or the last of them."""
EVALUATIONS = {
    "greedy": "eval/greedy/reward",
    "sampled": "eval/sampled/reward",
    "pairs": "eval/preference/accuracy",
    "pair_loss": "eval/preference/loss",
}
"""Metrics of evaluations by the name of their values in a row, as in greedy_before."""
ACCURACIES = {
    f"{kind}_{moment}" for kind in ("greedy", "sampled") for moment in ("before", "after")
}
"""Keys of a row with the mean reward of the held-out problems."""
SHORTEST_S = 60.0
"""Seconds that must be left to start a run."""


_WARM = "warm"
"""Subfolder of the quickstart's warm start."""
_SOLVED = "warm_solved"
"""Subfolder of a warm start whose demonstrations also have prompts with the solution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """An algorithm with its settings, and where its success is read."""

    overrides: tuple[str, ...]
    rates: tuple[float, ...] = (2e-4, 4e-4, 8e-4)
    """Learning rates of the actor to choose from."""
    kind: str = "rl"
    """rl: evaluated by the run itself; sft and dpo: the saved model is evaluated, and of dpo also
    the accuracy on held-out pairs; rm: that accuracy only.
    """
    full_reward: float = 1.0
    """Reward of a solved problem, by which evaluations are divided."""
    start: str = _WARM
    """Subfolder of the warm start that training begins with."""


_FOUR = ("batching.num_mini_batches=4",)
_FOUR_RATES = (5e-5, 1e-4, 2e-4)
# As many completions per step as 32 groups of 8.
_SINGLE = ("batching.prompts_per_step=256",)
_TEACHER = (
    "algorithm=distill",
    "batching.prompts_per_step=128",
    "teachers.main.engine.model.path=FOLDER/teacher/huggingface",
    "teachers.main.engine.device=cpu",
    "teachers.main.engine.precision.compute=fp32",
)
_PAIRS = (
    *("data.train=jsonl", "data.train.paths=[FOLDER/pairs.jsonl]", "data.train.prompt_key=prompt"),
    *("data.eval=jsonl", "data.eval.paths=[FOLDER/test_pairs.jsonl]"),
    "data.eval.prompt_key=prompt",
)
_LABELED = (
    *(override.replace("pairs.jsonl", "labeled.jsonl") for override in _PAIRS),
    *("data.train.answer_key=completion", "data.eval.answer_key=completion"),
)
_SUPERVISED_RATES = (5e-5, 2e-4, 1e-3)
# Both solutions of a pair become unlikely at higher rates, and the policy loses its format.
_PREFERENCE_RATES = (3e-6, 1e-5, 5e-5)
_GDPO = "reward.components={gsm8k_strict: 1.0, gsm8k_flexible: 1.0}"

METHODS: Mapping[str, Method] = {
    # Advantage estimators, one update per step.
    "grpo": Method(overrides=("algorithm=grpo",)),
    "dr_grpo": Method(overrides=("algorithm=dr_grpo",), rates=(4e-4, 8e-4, 1.6e-3)),
    "rloo": Method(overrides=("algorithm=rloo",)),
    "reinforce_plus_plus": Method(overrides=("algorithm=reinforce_plus_plus", *_SINGLE)),
    "reinforce_plus_plus_baseline": Method(
        overrides=("algorithm=grpo", "algorithm.advantage=reinforce_plus_plus_baseline")
    ),
    "remax": Method(overrides=("algorithm=remax", *_SINGLE)),
    "opo": Method(overrides=("algorithm=opo",)),
    "gpg": Method(overrides=("algorithm=gpg",)),
    "gdpo": Method(overrides=("algorithm=gdpo", _GDPO), full_reward=2.0),
    "maxrl": Method(overrides=("algorithm=maxrl",)),
    "grpo_passk": Method(overrides=("algorithm=grpo_passk",)),
    "optimal_token_baseline": Method(overrides=("algorithm=optimal_token_baseline",)),
    "turn_grpo": Method(overrides=("algorithm=turn_grpo",)),
    # With the default of 0.05, lambda is 0 for rollouts of up to 20 tokens, and these have 27 at
    # most: advantages would come from an untrained critic alone.
    "vapo": Method(
        overrides=(
            "algorithm=vapo",
            "algorithm.advantage.length_factor=1",
            *_SINGLE,
            "critic.engine.optimizer.lr=1e-3",
        )
    ),
    "gae": Method(overrides=("algorithm=ppo", *_SINGLE, "critic.engine.optimizer.lr=1e-3")),
    # Data flow.
    "dapo": Method(overrides=("algorithm=dapo",)),
    "icepop": Method(overrides=("algorithm=icepop",)),
    "geometric_mask": Method(overrides=("algorithm=geometric_mask",)),
    "prompt_mean": Method(overrides=("algorithm=grpo", "algorithm.aggregation=prompt_mean")),
    # Policy losses, four updates per step.
    "ppo": Method(overrides=("algorithm=grpo", *_FOUR), rates=_FOUR_RATES),
    "gspo": Method(overrides=("algorithm=gspo", *_FOUR), rates=_FOUR_RATES),
    "cispo": Method(overrides=("algorithm=cispo", *_FOUR), rates=_FOUR_RATES),
    "gmpo": Method(overrides=("algorithm=gmpo", *_FOUR), rates=_FOUR_RATES),
    "clip_cov": Method(overrides=("algorithm=clip_cov", *_FOUR), rates=_FOUR_RATES),
    "kl_cov": Method(overrides=("algorithm=kl_cov", *_FOUR), rates=_FOUR_RATES),
    "sapo": Method(overrides=("algorithm=sapo", *_FOUR), rates=_FOUR_RATES),
    "dppo": Method(overrides=("algorithm=dppo", *_FOUR), rates=_FOUR_RATES),
    "opsm": Method(overrides=("algorithm=opsm", *_FOUR), rates=_FOUR_RATES),
    # Distillation from the finished quickstart.
    "reverse_kl": Method(overrides=_TEACHER),
    "reverse_kl as reward": Method(
        overrides=(*_TEACHER, "distillation.objective=reverse_kl_reward")
    ),
    "forward_kl": Method(
        overrides=(*_TEACHER, "distillation.objective={name: forward_kl, top_k: 16}")
    ),
    "top_k_reverse_kl": Method(
        overrides=(*_TEACHER, "distillation.objective={name: top_k_reverse_kl, top_k: 16}")
    ),
    "off-policy distillation": Method(
        overrides=(
            *_TEACHER,
            "distillation.objective={name: top_k_reverse_kl, top_k: 16}",
            "distillation.off_policy_fraction=0.5",
            "data.train.completion_key=solution",
        )
    ),
    # The teacher's prompt contains the solution, so the warm start must have seen such prompts.
    **{
        f"self-distillation with the {teacher} policy": Method(
            overrides=(
                "algorithm=distill",
                "batching.prompts_per_step=128",
                "data.train.teacher_prompt_key=solved",
                f"distillation.self_teacher={teacher}",
                "distillation.objective={name: top_k_reverse_kl, top_k: 16}",
            ),
            # At higher rates the policy changes faster than its teacher can correct it.
            rates=_FOUR_RATES,
            start=_SOLVED,
        )
        for teacher in ("current", "ema")
    },
    "jensen_shannon": Method(
        overrides=(*_TEACHER, "distillation.objective={name: jensen_shannon, top_k: 16}")
    ),
    # Right against wrong solutions.
    "sft": Method(overrides=("task=sft", "data.eval=null"), rates=(2e-4, 5e-4, 1e-3), kind="sft"),
    "dft": Method(
        overrides=("task=sft", "sft=dft", "data.eval=null"), rates=(2e-4, 5e-4, 1e-3), kind="sft"
    ),
    "dpo": Method(
        overrides=("task=dpo", "ref=frozen", *_PAIRS), rates=_PREFERENCE_RATES, kind="dpo"
    ),
    "dpo with sft_coef": Method(
        overrides=("task=dpo", "ref=frozen", *_PAIRS, "preference.sft_coef=1.0"),
        rates=(5e-5, 2e-4, 5e-4),
        kind="dpo",
    ),
    "dpo with ipo": Method(
        overrides=("task=dpo", "ref=frozen", *_PAIRS, "preference=ipo"),
        rates=_PREFERENCE_RATES,
        kind="dpo",
    ),
    "dpo with hinge": Method(
        overrides=("task=dpo", "ref=frozen", *_PAIRS, "preference=hinge"),
        rates=_PREFERENCE_RATES,
        kind="dpo",
    ),
    "simpo": Method(
        overrides=("task=dpo", "preference=simpo", *_PAIRS), rates=_PREFERENCE_RATES, kind="dpo"
    ),
    "orpo": Method(
        overrides=("task=dpo", "preference=orpo", *_PAIRS), rates=(5e-5, 2e-4, 5e-4), kind="dpo"
    ),
    "kto": Method(
        overrides=("task=dpo", "preference=kto", "ref=frozen", *_LABELED),
        rates=_PREFERENCE_RATES,
        kind="dpo",
    ),
    "reward model": Method(
        overrides=("task=rm", "actor.engine.model.model_type=reward_model", *_PAIRS),
        rates=_SUPERVISED_RATES,
        kind="rm",
    ),
}


Job = tuple[str, float, int]
"""Method, learning rate and seed of one run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Folder of a measurement, and how to start its runs."""

    out: Path
    rows: Rows
    deadline: float
    """time.monotonic() at which no run may continue."""
    steps: int = STEPS
    num_problems: int = NUM_PROBLEMS
    is_rehearsal: bool = False

    def train(self, overrides: Sequence[str], *, log: Path) -> int | str:
        """Run temper-train; return its exit status, or a sentence if the time was over."""
        command = [sys.executable, "-m", "temper_trainer", *overrides]
        with log.open("w") as output:
            try:
                return subprocess.run(
                    command,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=max(self.deadline - time.monotonic(), 1),
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                return "stopped, because the time was over"


def start_from(model: Path, tokenizer: Path) -> list[str]:
    """Return the quickstart's overrides that start from a saved model without a warm start."""
    return [
        "experiment=quickstart",
        "warm_start=null",
        "~actor.engine.model.architecture",
        f"actor.engine.model.path={model}",
        "data.tokenizer.kind=pretrained",
        f"data.tokenizer.path={tokenizer}",
        "run.save_every=100000",
        "run.progress=false",
    ]


def prepare(bench: Bench, names: Sequence[str]) -> None:
    """Make what the methods share: the warm start, the teacher if one needs it, and the pairs."""
    quickstart = ["experiment=quickstart", *(_REHEARSAL if bench.is_rehearsal else ())]
    if any(METHODS[name].start == _WARM for name in names):
        start = ["run.total_steps=1", "data.eval.max_rows=16"]
        make_quickstart(bench, _WARM, [*quickstart, *start])
    if any(METHODS[name].start == _SOLVED for name in names):
        write_solved(bench.out / "solved.jsonl")
        demonstrations = f"{{name: jsonl, paths: [{bench.out / 'solved.jsonl'}]}}"
        make_quickstart(
            bench,
            _SOLVED,
            [
                *quickstart,
                "run.total_steps=1",
                "data.eval.max_rows=16",
                f"warm_start.data={demonstrations}",
                *([] if bench.is_rehearsal else ["warm_start.total_steps=1000"]),
            ],
        )
    if any("FOLDER/teacher" in override for name in names for override in METHODS[name].overrides):
        make_quickstart(bench, "teacher", quickstart)
    for name, seed, split in (("pairs", 5, "train"), ("test_pairs", 6, "test")):
        if not (bench.out / f"{name}.jsonl").exists():
            size = NUM_PAIRS if split == "train" else NUM_PROBLEMS
            write_pairs(bench.out / f"{name}.jsonl", num_pairs=size, seed=seed, split=split)
        labeled = bench.out / f"{name.replace('pairs', 'labeled')}.jsonl"
        write_labeled(labeled, pairs=bench.out / f"{name}.jsonl")


def write_solved(path: Path) -> None:
    """Write the quickstart's demonstrations, each followed by its problem after the solution.

    The former are half wrong. The latter are right, so a model learns to read a given solution.
    """
    source = ArithmeticSource(
        seed=3, max_rows=32_000, wrong_first_operation=0.5, teacher_prompt_key="solved"
    )
    lines = [
        json.dumps({"question": question, "answer": answer})
        for row in generate_arithmetic_rows(source)
        for question, answer in ((row.prompt, row.solution), (row.teacher_prompt, row.answer))
    ]
    path.write_text("\n".join(lines) + "\n")


def write_labeled(path: Path, *, pairs: Path) -> None:
    """Write one completion of each pair with its label: right and wrong ones in turn."""
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    labeled = [
        {
            "prompt": row["prompt"],
            "completion": row["chosen" if i % 2 == 0 else "rejected"],
            "label": i % 2 == 0,
        }
        for i, row in enumerate(rows)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in labeled))


def make_quickstart(bench: Bench, name: str, overrides: Sequence[str]) -> None:
    """Run the quickstart in a subfolder, unless it has finished there."""
    folder = bench.out / name
    if (folder / "huggingface" / "config.json").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    log = bench.out / f"{name}.txt"
    code = bench.train([*overrides, f"run.dir={folder}"], log=log)
    if code != 0:
        raise SystemExit(f"the quickstart failed ({code}): read {log}")


def measure(bench: Bench, name: str, *, rate: float, seed: int) -> None:
    """Run one method with a learning rate and a seed, and add its row."""
    method = METHODS[name]
    label = f"{name.replace(' ', '_').replace(',', '')}-{rate:g}-{seed}"
    run_dir = bench.out / "runs" / label
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.parent.mkdir(exist_ok=True)
    log = run_dir.parent / f"{label}.txt"
    warm = bench.out / method.start / "warm_start" / "huggingface"
    tokenizer = bench.out / method.start / "tokenizer"
    evaluates = method.kind == "rl"
    placed = [override.replace("FOLDER", str(bench.out)) for override in method.overrides]
    started = time.perf_counter()
    code = bench.train(
        [
            *start_from(warm, tokenizer),
            *([] if evaluates else list_without_sampling()),
            *placed,
            f"actor.engine.optimizer.lr={rate}",
            f"run.seed={seed}",
            f"run.total_steps={bench.steps}",
            *(
                [f"run.eval_every={bench.steps}", f"data.eval.max_rows={bench.num_problems}"]
                if evaluates
                else []
            ),
            f"run.dir={run_dir}",
            f"run.save_model={str(not evaluates).lower()}",
        ],
        log=log,
    )
    row: dict[str, object] = {
        "method": name,
        "rate": rate,
        "seed": seed,
        "ok": code == 0,
        "exit": code,
    }
    if code == 0:
        row |= read_curve(run_dir / "metrics.jsonl")
        if method.kind in ("sft", "dpo"):
            row |= evaluate_saved(bench, run_dir, warm=warm, tokenizer=tokenizer)
        # The time may be over before the evaluation of the saved model ends.
        if f"{list_results(method)[0]}_after" not in row:
            return
    else:
        row["log"] = log.read_text(errors="replace").splitlines()[-15:]
    row["wall_s"] = round(time.perf_counter() - started, 1)
    if code == 0 or isinstance(code, int):
        bench.rows.add(row)
    shutil.rmtree(run_dir, ignore_errors=True)


def list_without_sampling() -> list[str]:
    """Return the overrides without the quickstart's evaluations, and with the size of an update."""
    return [
        "~run.eval_every",
        "~run.eval_sampled",
        "~run.eval_sampling",
        "~sampling",
        f"batching.prompts_per_step={PAIRS_PER_STEP}",
    ]


def read_curve(metrics: Path) -> dict[str, object]:
    """Return the metric that a reader follows, by step, and accuracies before and after."""
    steps = [json.loads(line) for line in metrics.read_text().splitlines() if line]
    result: dict[str, object] = {}
    for key in CURVES:
        values = [round(step[key], 5) for step in steps if key in step]
        if values:
            result[key] = values
    for kind, metric in EVALUATIONS.items():
        values = [step[metric] for step in steps if metric in step]
        if values:
            result[f"{kind}_before"], result[f"{kind}_after"] = values[0], values[-1]
    return result


def evaluate_saved(
    bench: Bench, run_dir: Path, *, warm: Path, tokenizer: Path
) -> dict[str, object]:
    """Return the accuracy of the saved model, and of the model that training began with."""
    result: dict[str, object] = {}
    for moment, model in (("before", warm), ("after", run_dir / "huggingface")):
        folder = run_dir / f"eval_{moment}"
        code = bench.train(
            [
                *start_from(model, tokenizer),
                "task=eval",
                f"data.eval.max_rows={bench.num_problems}",
                f"run.dir={folder}",
            ],
            log=run_dir / f"eval_{moment}.txt",
        )
        if code == 0:
            values = read_curve(folder / "metrics.jsonl")
            result |= {
                f"{kind}_{moment}": values[f"{kind}_after"] for kind in ("greedy", "sampled")
            }
    return result


def find_best_rate(rows: Sequence[Mapping[str, Any]], name: str, *, kind: str) -> float | None:
    """Return the learning rate of the best result on the first seed; None while one is missing.

    Args:
        rows: Rows of all runs.
        name: Name of the method.
        kind: Result that is compared, a key of `EVALUATIONS`.
    """
    own = {
        row["rate"]: row.get(f"{kind}_after", -1.0)
        for row in rows
        if row["method"] == name and row["seed"] == SEEDS[0]
    }
    if not own.keys() >= set(METHODS[name].rates):
        return None
    return max(METHODS[name].rates, key=lambda rate: own[rate])


def list_results(method: Method) -> list[str]:
    """Return the results of which each has a best learning rate, as keys of `EVALUATIONS`."""
    return {"dpo": ["greedy", "pairs"], "rm": ["pairs"]}.get(method.kind, ["greedy"])


def read_rows(out: Path) -> list[dict[str, Any]]:
    """Return the rows of all runs so far, with rewards of evaluations as accuracies."""
    path = out / "rows.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for row in rows:
        for key in row.keys() & ACCURACIES:
            row[key] /= METHODS[row["method"]].full_reward
    return rows


def list_missing(bench: Bench, names: Sequence[str]) -> list[Job]:
    """Return what has no row: each method's grid, then its best rates on the other seeds."""
    rows = read_rows(bench.out)
    finished = {(row["method"], row["rate"], row["seed"]) for row in rows}
    jobs: list[Job] = []
    for name in names:
        rates = METHODS[name].rates[:1] if bench.is_rehearsal else METHODS[name].rates
        jobs += [(name, rate, SEEDS[0]) for rate in rates]
        best = {find_best_rate(rows, name, kind=kind) for kind in list_results(METHODS[name])}
        jobs += [(name, rate, seed) for rate in best if rate is not None for seed in SEEDS[1:]]
    return [job for job in jobs if job not in finished]


def run_all(bench: Bench, names: Sequence[str], *, parallel: int) -> None:
    """Run what is missing, method by method; a failed run has a row and is not repeated."""
    lock = threading.Lock()
    claimed: set[Job] = set()

    def has_time() -> bool:
        return bench.deadline - time.monotonic() >= SHORTEST_S

    def work() -> None:
        while has_time():
            with lock:
                missing = list_missing(bench, names)
                job = next((each for each in missing if each not in claimed), None)
                if job is not None:
                    claimed.add(job)
            if job is not None:
                measure(bench, job[0], rate=job[1], seed=job[2])
            elif missing:
                time.sleep(1)  # the result of a running job may add jobs
            else:
                return

    with ThreadPoolExecutor(parallel) as pool:
        for worker in [pool.submit(work) for _ in range(parallel)]:
            worker.result()


def print_table(out: Path) -> None:
    """Print the results of each method on its seeds, and draw its curves."""
    rows = read_rows(out)
    header = ("method", "learning rate", "greedy, before", "after, by seed")
    print("| " + " | ".join([*header, "sampled, before", "after, by seed", "gain"]) + " |")
    print("|---|---|---|---|---|---|---|")
    curves: dict[str, list[list[float]]] = {}
    for name, method in METHODS.items():
        *_, kind = list_results(method)  # the curves of preferences are accuracies on pairs
        own = find_best_rows(rows, name, kind=kind)
        if len(own) == len(SEEDS) and get_curve(own[0]):
            curves[name] = [get_curve(row) for row in own]
        if "greedy" in list_results(method) and (own := find_best_rows(rows, name, kind="greedy")):
            print_row(name, own, kinds=("greedy", "sampled"))
    print("\n| method | learning rate | pairs, before | after, by seed | gain |")
    print("|---|---|---|---|---|")
    for name, method in METHODS.items():
        if "pairs" in list_results(method) and (own := find_best_rows(rows, name, kind="pairs")):
            print_row(name, own, kinds=("pairs",))
    if curves:
        draw_curves(out / "curves.png", curves)


def find_best_rows(
    rows: Sequence[Mapping[str, Any]], name: str, *, kind: str
) -> list[Mapping[str, Any]]:
    """Return the rows of all seeds at a method's best learning rate; empty while one is missing."""
    best = find_best_rate(rows, name, kind=kind)
    own = [row for row in rows if (row["method"], row["rate"]) == (name, best) and row["ok"]]
    return sorted(own, key=lambda row: row["seed"])


def print_row(name: str, rows: Sequence[Mapping[str, Any]], *, kinds: Sequence[str]) -> None:
    """Print a line with results of a method before and after, and the gain of the first one."""
    cells = [f"`{name}`", f"{rows[0]['rate']:g}"]
    for kind in kinds:
        before = [row[f"{kind}_before"] for row in rows if f"{kind}_before" in row]
        after = [row[f"{kind}_after"] for row in rows if f"{kind}_after" in row]
        cells += [_mean(before), ", ".join(f"{value:.3f}" for value in after) or "-"]
    gain = describe_gain(rows, kind=kinds[0]) if len(rows) == len(SEEDS) else "not complete"
    print("| " + " | ".join([*cells, gain]) + " |")


def describe_gain(rows: Sequence[Mapping[str, Any]], *, kind: str) -> str:
    """Return the mean gain in accuracy with its standard error.

    The error has two parts: of the held-out problems or pairs (binomial, before and after), and of
    the mean over seeds.
    """
    gains = [row[f"{kind}_after"] - row[f"{kind}_before"] for row in rows]
    error = statistics.stdev(gains) ** 2 / len(gains) if len(gains) > 1 else 0.0
    for moment in ("before", "after"):
        accuracy = statistics.fmean(row[f"{kind}_{moment}"] for row in rows)
        error += accuracy * (1 - accuracy) / NUM_PROBLEMS
    gain = statistics.fmean(gains)
    verdict = "" if gain >= 2 * math.sqrt(error) else ", not shown to learn here"
    return f"{gain:+.3f} +- {math.sqrt(error):.3f}{verdict}"


def get_curve(row: Mapping[str, Any]) -> list[float]:
    """Return the training reward of a run, or the accuracy on its pairs."""
    for key in CURVES:
        if key in row:
            values = row[key]
            assert isinstance(values, list)
            return values
    return []


def draw_curves(path: Path, curves: Mapping[str, Sequence[Sequence[float]]]) -> None:
    """Draw one small plot per method: each seed, smoothed over five steps."""
    # Imported here because runs alone do not need matplotlib.
    from matplotlib.figure import Figure

    columns = 5
    height = math.ceil(len(curves) / columns)
    figure = Figure(figsize=(2.2 * columns, 1.7 * height), layout="constrained")
    grid = figure.subplots(height, columns, sharex=True, squeeze=False)
    for axes, (name, seeds) in zip(grid.flat, curves.items(), strict=False):
        for values in seeds:
            smooth = [statistics.fmean(values[max(0, i - 4) : i + 1]) for i in range(len(values))]
            axes.plot(range(1, len(values) + 1), smooth, linewidth=1)
        axes.set_title(name, fontsize=8)
        axes.tick_params(labelsize=6)
        axes.grid(alpha=0.3)
    for axes in list(grid.flat)[len(curves) :]:
        axes.axis("off")
    figure.savefig(path, dpi=110)


def _mean(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.3f}" if values else "-"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the missing runs, or print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default="grpo", help="names, or all")
    parser.add_argument("--out", type=Path, default=ROOT / ".temper" / "learning")
    parser.add_argument("--budget-s", type=float, default=36_000.0)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--table", action="store_true", help="print the table without running")
    chosen = parser.parse_args(arguments)
    out = chosen.out.resolve()
    if chosen.table:
        print_table(out)
        return
    out.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if not is_installed("temper-engine-fsdp"):
        entry_points = Path(tempfile.mkdtemp(prefix="temper-entry-points-"))
        write_entry_points(entry_points)
        os.environ["PYTHONPATH"] = f"{entry_points}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    bench = Bench(
        out=out,
        rows=Rows(path=out / "rows.jsonl"),
        deadline=time.monotonic() + chosen.budget_s,
        steps=2 if chosen.rehearse else STEPS,
        num_problems=16 if chosen.rehearse else NUM_PROBLEMS,
        is_rehearsal=chosen.rehearse,
    )
    names = list(METHODS) if chosen.methods == "all" else chosen.methods.split(",")
    if unknown := sorted(set(names) - set(METHODS)):
        parser.error(f"--methods names {', '.join(unknown)}; known are {', '.join(METHODS)}")
    prepare(bench, names)
    run_all(bench, names, parallel=chosen.parallel)
    print_table(out)


if __name__ == "__main__":
    main(sys.argv[1:])
