"""Run the steps of `dev.py test`, three at a time, and print one table of their results.

All steps run, also after one that failed. A step is killed after ten times its budget; busy hosts
have needed six times. Uses only the standard library.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tools.coverage_table import build_coverage_table, clear_coverage, wrap_in_coverage
from tools.environment import EnvironmentSetupError, ensure_environment

KILL_AFTER_BUDGETS = 10
"""On two slow cores next to other programs, steps have taken six times as long as when idle."""
TAIL_LINES = 40
REPORTS = Path(".temper") / "reports"
"""JUnit reports of the last run, one per pytest command; below the repository."""
NUM_PARALLEL_STEPS = 3
"""Number of steps that run at a time, for two cores.

Most steps use one core, and wait for timers, disks and starting processes for a fifth of their
time. Next to two others a step takes about 1.4 times as long as next to one.
"""
DEFAULT_VARIABLES = {"OMP_NUM_THREADS": "1"}
"""Environment variables of the steps, unless the caller sets them.

With a thread per core in each process, the threads of one step spin at their barriers while another
step has the core: the tests of split invariance take 30 s of CPU time instead of 5 s. The nightly
sessions keep the default, so that the tests also run on several threads.
"""
STEP_VARIABLES = {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": ""}
"""Environment variables of the steps, whatever the caller sets.

Without bytecode files each of hundreds of processes compiles our modules, and each session of
pytest rewrites the assertions of the kit and of Hypothesis, which takes seconds.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Commands that run one after the other, with a time budget."""

    name: str
    budget_s: float
    """Expected time on two otherwise idle cores, while NUM_PARALLEL_STEPS steps run."""
    commands: tuple[tuple[str, ...], ...]
    """Arguments of the environment's Python, one tuple per command."""
    is_pytest: bool = False
    """True if each command is a pytest run, whose tests are counted one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Numbers of tests by outcome; expected failures count as skipped, as in pytest's reports."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            passed=self.passed + other.passed,
            failed=self.failed + other.failed,
            skipped=self.skipped + other.skipped,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Outcome of one step."""

    step: Step
    took_s: float
    counts: Counts
    failures: tuple[str, ...]
    """One sentence for each command that failed; empty if the step passed."""
    tail: tuple[str, ...] = field(default=())
    """Last lines of the output."""


def _pytest(*arguments: str) -> tuple[tuple[str, ...], ...]:
    return (("-m", "pytest", "-q", "--durations=5", "-m", "not nightly", *arguments),)


def _conformance_tests(
    engine: str, *arguments: str, expressions: Mapping[str, str]
) -> tuple[tuple[str, ...], ...]:
    """Run the kit on an engine; `expressions` maps a layout's id to a -k expression of tests."""
    chosen = " or ".join(f"({layout} and ({which}))" for layout, which in expressions.items())
    chosen = f"({chosen}) and not {' and not '.join(NIGHTLY_TESTS_OF_THE_KIT)}"
    return _pytest(
        "--pyargs", "temper_engine_api.conformance", "--engine", engine, *arguments, "-k", chosen
    )


FAMILIES_ON_TWO_RANKS = "gpt_oss or deepseek_v3 or nemotron_h"
"""Families that FSDPEngine shards in different ways, as a -k expression."""
UPDATED_FAMILIES = "qwen3_next or gemma3_text"
"""Other families of which FSDPEngine makes five updates, as a -k expression."""
HYBRID_FAMILIES = "qwen3_next or qwen3_5 or nemotron_h"
"""Families with linear attention or Mamba layers, as a -k expression."""

NIGHTLY_TESTS_OF_THE_KIT: tuple[str, ...] = (
    "offloading_changes_no_number[2-ranks-optimizer",
    "offloading_changes_no_number[2-ranks-parameters",
    "fresh_run[2-ranks-forward_backward_step",
    "training_changes_the_head[2-ranks-reward",
    "router_loss_matches_transformers[2-ranks-router_z_loss",
    "adapter_loads_in_peft_with_same_logits[2-ranks-attention",
    "follows_the_schedule[2-ranks-linear",
    "interrupted_load_is_completed_before_training[2-ranks-load_state",
    "follows_the_schedule[2-ranks-constant",
    # The sizes of data-parallel groups are tested with one micro-batch, and four contain two.
    *(
        f"gradient_is_independent_of_micro_batch_split[{layout}-{split}"
        for layout in ("2-ranks", "tp2")
        for split in ("one", "two")
    ),
    # On one rank, two calls are compared with all objectives.
    *(
        f"two_calls_then_step_equal_one_call[{layout}-probe_{probe}"
        for layout in ("2-ranks", "tp2", "pp2-vpp2")
        for probe in ("gspo", "dpo", "distillation", "clip_cov")
    ),
    # All are compared on FSDPEngine.
    *(
        f"gradient_matches_oracle_for_every_aggregation[{layout}-{aggregation}"
        for layout in ("tp2", "pp2-vpp2", "cp2")
        for aggregation in ("token_sum", "sequence_mean_token_sum")
    ),
    # The exported tensors of all models are compared with their files.
    *(
        f"exported_weights_give_same_logits_in_transformers[2-ranks-{model}"
        for model in ("qwen2-grouped", "llama", "qwen3")
    ),
    # In engine-megatron's tests its updates are compared between both engines.
    "five_updates_of_family_match_adamw[2-ranks-deepseek_v3",
    # Adapters in its experts are compared.
    "family_adapter_matches_oracle[2-ranks-gpt_oss",
)
"""Parts of the names of tests, for parameters that share their path with another one."""

MEGATRON_FAMILIES = (
    "mixtral,glm4_moe,deepseek_v3,gpt_oss,gemma3_text,qwen3_next,qwen3_5_text,qwen3_5_moe_text,"
    "nemotron_h"
)
"""Families of the kit that engine-megatron supports."""

ENVIRONMENT = Step(name="environment", budget_s=2 * 60, commands=())

# Budgets are about the times of a whole run on two otherwise idle cores, three steps at a time, as
# docs/records/nightly.md has them.
STEPS = (
    Step(
        name="lint",
        budget_s=18,
        commands=(
            ("-m", "ruff", "check", "."),
            ("-m", "ruff", "format", "--check", "."),
            ("tools/wording.py",),
        ),
    ),
    Step(name="types", budget_s=48, commands=(("-m", "mypy"),)),
    Step(
        name="layers",
        budget_s=5,
        commands=(
            ("-c", "from importlinter.cli import lint_imports_command as c; c()"),
            ("tools/layers.py",),
            ("tools/api.py",),
        ),
    ),
    Step(
        name="engine-api",
        budget_s=115,
        commands=_pytest(
            "packages/engine-api/tests", "--ignore=packages/engine-api/tests/conformance"
        ),
        is_pytest=True,
    ),
    Step(
        name="kit-itself",
        budget_s=255,
        commands=_pytest("packages/engine-api/tests/conformance"),
        is_pytest=True,
    ),
    Step(
        name="kit-on-fsdp",
        budget_s=395,
        # Two ranks run every test, of parameters that share a path one. A single rank reduces
        # gradients and saves its state differently, FSDP1 steps and saves its state differently;
        # their other tests are nightly. All layouts share one session, because each session
        # imports the engine in every rank. Three families of models run on two ranks: with experts
        # and sinks, with experts and latent attention, and with Mamba layers. Loss and gradients
        # of the other families are compared on one rank, and outputs and updates of two of them.
        # The sessions `conformance` and `families` run everything every night.
        commands=_conformance_tests(
            "fsdp",
            *("--world-sizes", "1,2"),
            "--layouts",
            "fsdp1.2,sp2.2,head-chunks.1,no-reshard.2,fsdp1-replicated.2,replicated.2",
            *("--families", "all"),
            expressions={
                "[2-ranks": f"not (test_family.py and not ({FAMILIES_ON_TWO_RANKS})) and not "
                "(adapter_in_family_experts and not (gpt_oss or nemotron_h or qwen3_vl_moe))",
                "[1-rank": "test_gradient.py or test_rfc_loop.py or resume_is_bitwise "
                "or test_family.py and (gradient or (outputs or updates) and "
                f"({UPDATED_FAMILIES})) and not ({FAMILIES_ON_TWO_RANKS})",
                "[fsdp1.2": "resume_is_bitwise or ten_updates",
                "[sp2.2": "(test_gradient.py or test_value.py or test_logprob.py) "
                "and (data_parallel_size or value or entropy)",
                "[head-chunks.1": "test_sizes.py or test_logprob.py",
                # All gradients, with one and with two calls per update.
                **dict.fromkeys(
                    ("[no-reshard.2", "[fsdp1-replicated.2", "[replicated.2"),
                    "clipped_ppo and (two_calls_then_step or data_parallel_size)",
                ),
            },
        ),
        is_pytest=True,
    ),
    Step(
        name="engine-fsdp",
        budget_s=138,
        commands=_pytest("packages/engine-fsdp/tests"),
        is_pytest=True,
    ),
    Step(
        name="kit-on-megatron",
        budget_s=180,
        # Every mandatory group that trains or computes outputs, each in its most demanding layout.
        # Families run in one layout each; the session `families` runs the others every night. Of
        # each, gradients and exported weights are compared, with the log-probs that they give.
        commands=_conformance_tests(
            "megatron",
            *("--layouts", "tp2,pp2-vpp2,cp2,tp2-sp,ep2"),
            *("--families", MEGATRON_FAMILIES),
            expressions={
                "[tp2 and not [tp2-sp": "test_gradient.py or test_weights.py",
                "[pp2-vpp2": "test_gradient.py and (data_parallel_size or oracle or two_calls "
                "or norm) or test_update.py and not follows_the_schedule or test_value.py "
                "or test_rfc_loop.py",
                "[cp2": "test_logprob.py or test_gradient.py "
                "and (data_parallel_size or oracle or logprob or entropy)",
                "[tp2-sp": "test_adapter.py and gradient "
                "or test_family.py and (gradient or exported or gemma3_text and not five_updates) "
                "and (gemma3_text or qwen3_5_text)",
                "[ep2": "test_family.py and (gradient or exported or qwen3_next "
                "or nemotron_h and not outputs or deepseek_v3 and adapter_matches)",
            },
        ),
        is_pytest=True,
    ),
    Step(
        name="engine-megatron",
        budget_s=232,
        commands=_pytest("packages/engine-megatron/tests"),
        is_pytest=True,
    ),
    # Runs of the training loops take as long as all other tests of the trainer.
    Step(
        name="trainer",
        budget_s=610,
        commands=_pytest("packages/trainer/tests", "--ignore=packages/trainer/tests/loops"),
        is_pytest=True,
    ),
    Step(
        name="trainer-loops",
        budget_s=545,
        commands=_pytest("packages/trainer/tests/loops"),
        is_pytest=True,
    ),
    Step(
        name="shim",
        budget_s=430,
        commands=_pytest("packages/legacy-shim/tests"),
        is_pytest=True,
    ),
    Step(name="tools", budget_s=155, commands=_pytest("tools/tests"), is_pytest=True),
    Step(name="docs", budget_s=110, commands=(("tools/docs.py",),)),
)

STEP_NAMES = tuple(step.name for step in STEPS)


def run_steps(root: Path, *, only: Sequence[str] | None = None, with_coverage: bool = False) -> int:
    """Create the environment, run the steps in it, and print the table.

    The last line printed is `N passed, N failed, N skipped`. It counts the tests of pytest, and
    each other step as one.

    Args:
        root: The repository.
        only: Names of the steps to run; all of them by default.
        with_coverage: Also print how much of each package the tests execute; takes longer.

    Returns:
        Exit status: 1 if a step failed.
    """
    started = time.monotonic()
    results = [_run_environment_step(root)]
    if not results[0].failures:
        python = ensure_environment(root)
        chosen = [step for step in STEPS if only is None or step.name in only]
        if with_coverage:
            clear_coverage(root)
        results += run_in_parallel(chosen, python=python, root=root, with_coverage=with_coverage)
        if with_coverage and any(step.is_pytest for step in chosen):
            print("\n" + build_coverage_table(root, python=python))
    print_report(results, took_s=time.monotonic() - started)
    return 1 if any(result.failures for result in results) else 0


def run_in_parallel(
    steps: Sequence[Step], *, python: Path, root: Path, with_coverage: bool = False
) -> list[Result]:
    """Run the steps, NUM_PARALLEL_STEPS at a time, and return their results in the given order.

    Steps with large budgets start first, so that no long step is left at the end. Ctrl-C kills
    all processes that were started.
    """
    with ThreadPoolExecutor(NUM_PARALLEL_STEPS) as pool:
        by_budget = sorted(steps, key=lambda step: -step.budget_s)
        futures = {
            step.name: pool.submit(
                run_step, step, python=python, root=root, with_coverage=with_coverage
            )
            for step in by_budget
        }
        try:
            return [futures[step.name].result() for step in steps]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            while any(future.running() for future in futures.values()):
                for group in list(_PROCESS_GROUPS):
                    _kill_group(group)
                time.sleep(0.1)
            raise


def run_step(step: Step, *, python: Path, root: Path, with_coverage: bool = False) -> Result:
    """Run the commands of one step; print their output line by line after the step's name."""
    started = time.monotonic()
    deadline = started + KILL_AFTER_BUDGETS * step.budget_s
    counts, failures, tail = Counts(), [], deque[str](maxlen=TAIL_LINES)
    for number, arguments in enumerate(step.commands):
        print(f"{step.name} === {' '.join(arguments)}", flush=True)
        report_file = root / REPORTS / f"{step.name}-{number}.xml"
        report_file.unlink(missing_ok=True)
        extra = [f"--junitxml={report_file}"] if step.is_pytest else []
        python_arguments = (
            wrap_in_coverage(arguments, root=root)
            if with_coverage and step.is_pytest
            else arguments
        )
        command = [str(python), *python_arguments, *extra]
        code = run_streamed(
            command, cwd=root, tail=tail, limit_s=deadline - time.monotonic(), name=step.name
        )
        failure = _describe_failure(code, step=step)
        counts += _read_counts(report_file, step=step, is_failed=failure is not None)
        if failure is not None:
            failures.append(failure)
    if not step.is_pytest:
        counts = Counts(failed=1) if failures else Counts(passed=1)
    took_s = time.monotonic() - started
    return Result(
        step=step, took_s=took_s, counts=counts, failures=tuple(failures), tail=tuple(tail)
    )


_PROCESS_GROUPS: set[int] = set()
"""Process groups of the running commands."""


def run_streamed(
    command: Sequence[str], *, cwd: Path, tail: deque[str], limit_s: float, name: str
) -> int | None:
    """Run a command and print its output line by line after `name`.

    `tail` collects the last lines of the output. After `limit_s` seconds the command is killed with
    all its child processes.

    Returns:
        Exit status of the command, or None if it was killed.
    """
    process = subprocess.Popen(
        command,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=DEFAULT_VARIABLES | os.environ | STEP_VARIABLES,
        # A separate process group, so that killing it reaches the rank processes too.
        start_new_session=True,
    )

    _PROCESS_GROUPS.add(process.pid)

    def forward_output() -> None:
        assert process.stdout is not None
        with process.stdout as output:
            for line in output:
                print(f"{name} | {line}", end="", flush=True)
                tail.append(line.rstrip("\n"))

    reader = threading.Thread(target=forward_output, daemon=True)
    reader.start()
    code: int | None
    try:
        code = process.wait(timeout=max(limit_s, 0))
    except subprocess.TimeoutExpired:
        code = None
    finally:
        # Also after a normal exit: a process that a test left running would keep the pipe open and
        # use a core of the next step.
        _kill_group(process.pid)
        process.wait()
        _PROCESS_GROUPS.discard(process.pid)
    reader.join(timeout=10)
    return code


def count_tests(junit_xml: str) -> Counts:
    """Count the tests in a JUnit report of pytest."""
    suites = list(ElementTree.fromstring(junit_xml).iter("testsuite"))
    total, failures, errors, skipped = (
        sum(int(suite.get(name, "0")) for suite in suites)
        for name in ("tests", "failures", "errors", "skipped")
    )
    return Counts(
        passed=max(total - failures - errors - skipped, 0),
        failed=failures + errors,
        skipped=skipped,
    )


def print_report(results: Sequence[Result], *, took_s: float) -> None:
    """Print the last output of failed steps, the table of budgets, and the line of totals.

    Args:
        results: Results of all steps, in the order of the table.
        took_s: Wall time of all steps together; steps overlap.
    """
    for result in results:
        if result.failures:
            print(f"\n=== last lines of {result.step.name}, which failed")
            print("\n".join(result.tail))
    rows = [("step", "budget", "actual", "result")]
    for result in results:
        outcome = "; ".join(result.failures) or "passed"
        if result.took_s > result.step.budget_s:
            outcome += " (over its budget)"
        rows.append(
            (
                result.step.name,
                _format_minutes(result.step.budget_s),
                _format_minutes(result.took_s),
                outcome,
            )
        )
    budget = _format_minutes(compute_total_budget_s(result.step for result in results))
    rows.append(
        (
            "all",
            budget,
            _format_minutes(took_s),
            "failed" if any(result.failures for result in results) else "passed",
        )
    )
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    print()
    for row in rows:
        print(
            " | ".join(
                [row[0].ljust(widths[0]), row[1].rjust(widths[1]), row[2].rjust(widths[2]), row[3]]
            )
        )
    total = sum((result.counts for result in results), Counts())
    print(f"\n{total.passed} passed, {total.failed} failed, {total.skipped} skipped", flush=True)


def compute_total_budget_s(steps: Iterable[Step]) -> float:
    """Return the expected wall time: the environment first, then the parallel steps."""
    budgets = {step.name: step.budget_s for step in steps}
    first = budgets.pop(ENVIRONMENT.name, 0.0)
    return first + sum(budgets.values()) / NUM_PARALLEL_STEPS


def _run_environment_step(root: Path) -> Result:
    started = time.monotonic()
    failures: tuple[str, ...] = ()
    tail: tuple[str, ...] = ()
    try:
        ensure_environment(root)
    except EnvironmentSetupError as error:
        failures, tail = ("failed, so no other step was run",), (str(error),)
    counts = Counts(failed=1) if failures else Counts(passed=1)
    took_s = time.monotonic() - started
    return Result(step=ENVIRONMENT, took_s=took_s, counts=counts, failures=failures, tail=tail)


def _describe_failure(code: int | None, *, step: Step) -> str | None:
    if code == 0:
        return None
    if code is None:
        limit_s = KILL_AFTER_BUDGETS * step.budget_s
        return f"killed after {_format_minutes(limit_s)}, {KILL_AFTER_BUDGETS} times its budget"
    if step.is_pytest and code == 5:
        return "failed: no test was found"
    return f"failed with exit status {code}"


def _read_counts(report_file: Path, *, step: Step, is_failed: bool) -> Counts:
    """Count the tests of a pytest command; a command that failed without a failed test is one."""
    if not step.is_pytest:
        return Counts()
    counts = count_tests(report_file.read_text()) if report_file.exists() else Counts()
    return counts + Counts(failed=1) if is_failed and counts.failed == 0 else counts


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def _format_minutes(seconds: float) -> str:
    return f"{int(seconds // 60)}:{int(seconds % 60):02d}"
