"""Loops that sample ahead of training, on the same small work."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from temper_engine_api.errors import BatchError, ConfigError
from temper_trainer.loops import RunResult, rl_loop

Run = Callable[..., RunResult]
Rows = Callable[..., list[dict[str, float]]]
SHORT_RUN = (
    "warm_start=null",
    "data.eval=null",
    "run.save_model=false",
    "run.total_steps=4",
    "sampling.max_tokens=12",
)
ONE = (*SHORT_RUN, "loop=one_step_off")
ASYNC = (*SHORT_RUN, "loop=async")


@pytest.mark.bitwise
def test_one_step_off_trains_one_update_behind_and_repeats_bitwise(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    run(tmp_path / "a", *ONE)
    run(tmp_path / "b", *ONE)
    assert [row["staleness/max"] for row in rows(tmp_path / "a")] == [0, 1, 1, 1]
    assert rows(tmp_path / "a") == rows(tmp_path / "b")
    run(tmp_path / "sync", *SHORT_RUN)
    one, sync = rows(tmp_path / "a"), rows(tmp_path / "sync")
    # Both sample steps 1 with the first weights; so does one_step_off its second step, with the
    # seeds of step 2.
    assert one[0]["actor/grad_norm"] == sync[0]["actor/grad_norm"]
    assert one[2] != sync[2]


@pytest.mark.bitwise
def test_sampling_thread_computes_with_the_default_matmul_kernels(run: Run, tmp_path: Path) -> None:
    seen: set[str] = set()

    def note(module: nn.Module, arguments: object) -> None:
        if threading.current_thread().name.startswith("sampling"):
            seen.add(torch.get_float32_matmul_precision())

    hook = nn.modules.module.register_module_forward_pre_hook(note)
    try:
        run(tmp_path / "run", *ONE)
    finally:
        hook.remove()
    # The engine sets "medium" for its process while it trains the previous batch.
    assert seen == {"highest"}


def test_one_step_off_resumes_with_the_first_untrained_prompts(
    run: Run, rows: Rows, tmp_path: Path
) -> None:
    run(tmp_path / "run", *ONE, "run.total_steps=3", "run.save_every=2")
    state = json.loads(
        (tmp_path / "run" / "checkpoints" / "step_00000002" / "trainer" / "state.json").read_text()
    )
    assert (
        state["cursor"]["index"] == 8
    )  # 2 steps of 4 prompts; those of step 3 were in work and are asked again
    run(tmp_path / "run", *ONE, "run.total_steps=4", "run.resume=auto")
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4]


@pytest.mark.parametrize("partial", [True, False])
def test_async_never_trains_on_weights_older_than_its_limit(
    run: Run, rows: Rows, tmp_path: Path, partial: bool
) -> None:
    more = (
        "asynchrony.max_staleness=2",
        f"asynchrony.partial_rollouts={partial}".lower(),
        "run.total_steps=6",
        "run.save_every=3",
    )
    run(tmp_path / "run", *ASYNC, *more)
    step_rows = rows(tmp_path / "run")
    assert [row["step"] for row in step_rows] == [1, 2, 3, 4, 5, 6]
    assert all(row["staleness/max"] <= 2 for row in step_rows)
    assert all(row["staleness/mean"] <= row["staleness/max"] for row in step_rows)
    assert max(row["staleness/max"] for row in step_rows) >= 1
    state = json.loads(
        (tmp_path / "run" / "checkpoints" / "step_00000003" / "trainer" / "state.json").read_text()
    )
    # 3 steps of 4 prompts. A step trains the first groups that are ready, so prompts behind an
    # untrained one may be trained already.
    assert state["cursor"]["index"] + len(state["trained_ahead"]) == 12


@pytest.mark.bitwise
def test_replay_of_an_async_run_trains_the_same_bits(run: Run, rows: Rows, tmp_path: Path) -> None:
    more = ("asynchrony.max_staleness=2", "run.total_steps=6")
    run(tmp_path / "run", *ASYNC, *more, "rollout.record=true")
    record = tmp_path / "run" / "completions.jsonl"
    run(tmp_path / "replay", *ASYNC, *more, f"rollout.replay={record}")
    recorded, replayed = rows(tmp_path / "run"), rows(tmp_path / "replay")
    assert max(row["staleness/max"] for row in recorded) >= 1
    for row in (*recorded, *replayed):
        # It counts interruptions during the step, not those of the trained completions.
        del row["rollout/continued"]
    assert replayed == recorded
    with pytest.raises(ConfigError, match="has no completion for request"):
        run(tmp_path / "other", *ASYNC, *more, f"rollout.replay={record}", "run.seed=7")


def test_error_in_the_sampling_thread_ends_the_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def breaks(*given: object, **named: object) -> None:
        raise BatchError("no such luck")

    before = set(threading.enumerate())
    monkeypatch.setattr(rl_loop, "sample_groups", breaks)
    with pytest.raises(BatchError, match="no such luck"):
        run(tmp_path / "run", *ASYNC)
    names = {thread.name for thread in set(threading.enumerate()) - before}
    assert not any(name.startswith(("rollouts", "sampling")) for name in names)
