"""Environments of different users and what must work in each: `nox -s scenarios`.

Packages are installed as wheels built from this checkout into an otherwise empty environment. Their
dependencies come from the package index, with the versions of constraints/cpu.txt if `is_pinned`.
Needs only the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tools.environment import MEGATRON_BRIDGE, TORCH
from tools.pages import program, split_page

ROOT = Path(__file__).resolve().parent.parent

OLD_CONFIG = """\
defaults: [ppo_trainer, _self_]
algorithm: {adv_estimator: grpo}
data: {train_files: train.parquet, val_files: test.parquet, train_batch_size: 64}
trainer: {nnodes: 1, n_gpus_per_node: 1, logger: console}
actor_rollout_ref: {model: {path: model}, rollout: {name: vllm, n: 4}}
"""

SHORT_RUN = (
    "run.total_steps=3",
    "warm_start.total_steps=20",
    "data.eval.max_rows=50",
    "run.eval_every=3",
)
"""Shortens the quickstart: the command is the real one, but the reward has no time to rise."""

ORACLE = (
    "--pyargs",
    "temper_engine_api.conformance",
    "--engine",
    "temper_engine_api.conformance.oracle:OracleEngine",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One kind of user."""

    meaning: str
    """Description shown in the output."""
    installs: tuple[tuple[str, ...], ...]
    """Arguments of successive `pip install` calls, which also find the wheels."""
    is_pinned: bool = True
    """True if constraints/cpu.txt applies to the installations."""
    absent: tuple[str, ...] = ()
    """Modules that must not be installed."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Contents of the user's files, by name."""
    commands: tuple[tuple[str, ...], ...] = ()
    """Commands that must succeed in a folder with these files."""
    leaves: tuple[str, ...] = ()
    """Files that must exist afterwards."""
    statuses: tuple[int, ...] = (0,)
    """Exit statuses that count as success."""


def own_loop() -> str:
    """Return the program on the page about writing a training loop."""
    blocks, _ = split_page((ROOT / "docs" / "how-to" / "own-loop.md").read_text())
    return program(blocks, "python")


SCENARIOS = {
    "shim": Scenario(
        meaning="temper-legacy-shim alone translates a configuration, without torch",
        installs=(("temper-legacy-shim",),),
        absent=("torch", "numpy", "transformers", "ray", "temper_trainer", "temper_engine_api"),
        files={"old.yaml": OLD_CONFIG},
        commands=(
            (
                "temper-migrate",
                "config",
                "old.yaml",
                "--from-version",
                "v0.7.0",
                "--out",
                "new.yaml",
            ),
        ),
        leaves=("new.yaml",),
        statuses=(0, 10),  # 10: default values of the old system were written out
    ),
    "oracle": Scenario(
        meaning="temper-engine-api alone runs the kit's oracle",
        installs=((TORCH,), ("temper-engine-api[conformance]",)),
        absent=("ray", "hydra", "temper_engine_fsdp", "temper_trainer"),
        commands=(("python", "-m", "pytest", "-q", *ORACLE, "--report", "report.md"),),
        leaves=("report.md",),
    ),
    "own-loop": Scenario(
        meaning="temper-engine-fsdp alone trains in a loop of one's own",
        installs=((TORCH,), ("temper-engine-fsdp",)),
        absent=("ray", "hydra", "peft", "temper_trainer"),
        files={"loop.py": own_loop()},
        commands=(("python", "loop.py"),),
    ),
    "quickstart": Scenario(
        meaning="temper-trainer[fsdp] runs the quickstart, shortened",
        installs=((TORCH,), ("temper-trainer[fsdp]",)),
        absent=("ray", "vllm", "megatron", "peft"),
        commands=(("temper-train", "experiment=quickstart", *SHORT_RUN),),
        leaves=(
            "runs/quickstart/metrics.jsonl",
            "runs/quickstart/report.html",
            "runs/quickstart/huggingface/model.safetensors",
        ),
    ),
    "megatron": Scenario(
        meaning="temper-engine-megatron, and Megatron-Bridge as its README says (decision 21: no extra can name it)",
        installs=((TORCH,), ("temper-engine-megatron",), ("--no-deps", MEGATRON_BRIDGE)),
        absent=("ray", "hydra", "temper_trainer"),
        commands=(
            (
                "python",
                "-c",
                "from temper_engine_api.registry import load_engine_class; print(load_engine_class('megatron'))",
            ),
        ),
    ),
    "vllm": Scenario(
        meaning="temper-trainer[vllm] resolves; nothing is installed",
        installs=(("--dry-run", "--quiet", "temper-trainer[vllm]"),),
        is_pinned=False,
    ),
}
