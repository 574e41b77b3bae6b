"""Run small self-distillations: the policy or its moving average teaches with another prompt."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from temper_trainer.loops import RunResult

Run = Callable[..., RunResult]
Rows = Callable[..., list[dict[str, float]]]
SELF = (
    "warm_start=null",
    "data.eval=null",
    "algorithm=distill",
    "algorithm.group_size=1",
    "actor.engine.optimizer.lr=1e-2",
    "distillation.objective=top_k_reverse_kl",
)
SOLVED = ("data.train.teacher_prompt_key=solved",)
EMA = "distillation.self_teacher={name: ema, decay: 0.5}"


@pytest.mark.parametrize(
    "objective",
    [
        "top_k_reverse_kl",
        "reverse_kl",
        "reverse_kl_reward",
        "temper_trainer_test_losses:SquaredGap",
        "temper_trainer_test_losses:SquaredGapReward",
    ],
)
def test_policy_learns_from_itself_with_the_solution(
    run: Run, rows: Rows, tmp_path: Path, objective: str
) -> None:
    run(
        tmp_path / "run",
        *SELF,
        *SOLVED,
        f"distillation.objective={objective}",
        "distillation.self_teacher=current",
        "run.total_steps=2",
        "run.save_model=false",
    )
    for row in rows(tmp_path / "run"):
        assert row["teacher/self/samples"] == 4.0
        assert row["actor/grad_norm"] > 0
        if objective == "top_k_reverse_kl":
            assert row["distill/divergence"] > 0


def test_average_starts_at_the_policy_and_with_decay_0_follows_it(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    # With the same prompt, policy and average differ only where the weights do.
    for decay in (0.0, 0.9):
        run(
            tmp_path / f"{decay}",
            *SELF,
            f"distillation.self_teacher={{name: ema, decay: {decay}}}",
            "distillation.coef=0.0001",
            "algorithm.entropy_coef=1.0",
            "task=rl",
            "run.total_steps=3",
            "run.save_model=false",
        )
    following, lagging = rows(tmp_path / "0.0"), rows(tmp_path / "0.9")
    assert following[0]["distill/divergence"] == pytest.approx(0.0, abs=1e-5)
    assert lagging[0]["distill/divergence"] == pytest.approx(0.0, abs=1e-5)
    assert following[2]["distill/divergence"] == pytest.approx(0.0, abs=1e-5)
    assert lagging[2]["distill/divergence"] > 1e-4


# A checkpoint that is read without process group.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_resumed_run_continues_with_the_saved_average(run: Run, rows: Rows, tmp_path: Path) -> None:
    settings = (*SELF, *SOLVED, EMA, "run.save_every=2", "run.total_steps=4")
    run(tmp_path / "once", *settings)
    run(tmp_path / "twice", *settings, "run.total_steps=2", "run.save_model=false")
    run(tmp_path / "twice", *settings, "run.resume=auto")
    assert rows(tmp_path / "twice") == rows(tmp_path / "once")
    # The weights of policy and average, bit for bit.
    for role in ("actor", "averaged_actor"):
        once, twice = (
            read_shards(tmp_path / name / "checkpoints" / "step_00000004" / role)
            for name in ("once", "twice")
        )
        assert once.keys() == twice.keys()
        assert all(torch.equal(once[name], twice[name]) for name in once)


def read_shards(part: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a role's part of a checkpoint."""
    reader = FileSystemReader(part / "dcp")
    metadata = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    assert state
    load(state, storage_reader=reader, no_dist=True)
    return state


@pytest.mark.parametrize("loop", ["one_step_off", "async"])
def test_average_teaches_while_the_next_step_is_sampled(
    run: Run, rows: Rows, tmp_path: Path, loop: str
) -> None:
    settings = (*SELF, *SOLVED, EMA, f"loop={loop}", "run.total_steps=2", "run.save_model=false")
    run(tmp_path / "run", *settings)
    assert [row["teacher/self/samples"] for row in rows(tmp_path / "run")] == [4.0, 4.0]
