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
from tools.pages import join_blocks, split_page

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

    description: str
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
    expected_files: tuple[str, ...] = ()
    """Files that must exist afterwards."""
    statuses: tuple[int, ...] = (0,)
    """Exit statuses that count as success."""


def read_own_loop() -> str:
    """Return the program on the page about writing a training loop."""
    blocks, _ = split_page((ROOT / "docs" / "how-to" / "own-loop.md").read_text())
    return join_blocks(blocks, "python")


SCENARIOS = {
    "shim": Scenario(
        description="temper-legacy-shim translates a configuration without torch",
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
        expected_files=("new.yaml",),
        statuses=(0, 10),  # 10: default values of the old system were written out
    ),
    "oracle": Scenario(
        description="temper-engine-api runs the kit's oracle without other packages",
        installs=((TORCH,), ("temper-engine-api[conformance]",)),
        absent=("ray", "hydra", "temper_engine_fsdp", "temper_trainer"),
        commands=(("python", "-m", "pytest", "-q", *ORACLE, "--report", "report.md"),),
        expected_files=("report.md",),
    ),
    "own-loop": Scenario(
        description="temper-engine-fsdp trains in a user's own loop without the trainer",
        installs=((TORCH,), ("temper-engine-fsdp",)),
        absent=("ray", "hydra", "peft", "temper_trainer"),
        files={"loop.py": read_own_loop()},
        commands=(("python", "loop.py"),),
    ),
    "quickstart": Scenario(
        description="temper-trainer[fsdp] runs a shortened quickstart",
        installs=((TORCH,), ("temper-trainer[fsdp]",)),
        absent=("ray", "vllm", "megatron", "peft"),
        commands=(("temper-train", "experiment=quickstart", *SHORT_RUN),),
        expected_files=(
            "runs/quickstart/metrics.jsonl",
            "runs/quickstart/report.html",
            "runs/quickstart/huggingface/model.safetensors",
        ),
    ),
    "megatron": Scenario(
        # Decision 21: no extra can name Megatron-Bridge.
        description="temper-engine-megatron, with Megatron-Bridge installed as its README says",
        installs=((TORCH,), ("temper-engine-megatron",), ("--no-deps", MEGATRON_BRIDGE)),
        absent=("ray", "hydra", "temper_trainer"),
        commands=(
            (
                "python",
                "-c",
                (
                    "from temper_engine_api.registry import load_engine_class; "
                    "print(load_engine_class('megatron'))"
                ),
            ),
        ),
    ),
    "vllm": Scenario(
        description="temper-trainer[vllm] resolves; nothing is installed",
        installs=(("--dry-run", "--quiet", "temper-trainer[vllm]"),),
        is_pinned=False,
    ),
}
