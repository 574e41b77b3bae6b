"""Test that the profiler covers the configured updates and overwrites nothing."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.errors import ConfigError
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.engine import FSDPEngine


def update(engine: FSDPEngine, batch: SequenceBatch) -> None:
    engine.set_loss_fn(
        lambda data, predictions, ctx: (-predictions["logprob"][data.loss_mask].mean(), ctx)
    )
    engine.optimizer_zero_grad()
    with engine.train_mode():
        engine.forward_backward_step(batch)
    engine.optimizer_step()


def test_a_trace_contains_the_requested_update(
    start: Callable[..., FSDPEngine], batch: SequenceBatch, tmp_path: Path
) -> None:
    engine = start(profile_to=str(tmp_path), profile_from=2, profile_updates=1)
    file = tmp_path / "rank-0-updates-2-2.json"
    update(engine, batch)
    assert not file.exists()
    update(engine, batch)
    names = [event["name"] for event in json.loads(file.read_text())["traceEvents"]]
    # Adam with weight decay runs once for matrices and once for vectors.
    assert names.count("aten::_fused_adamw_") == 2
    with pytest.raises(ConfigError, match=r"already contains rank-0-updates-2-2\.json"):
        start(profile_to=str(tmp_path), profile_from=2, profile_updates=1)


def test_settings_of_a_profile_without_one_are_refused(config: FSDPConfig) -> None:
    with pytest.raises(
        ConfigError, match="profile_updates is 3, but has no effect without profile_to"
    ):
        replace(config, profile_updates=3)
    with pytest.raises(ConfigError, match="profile_from is 0, but must be at least 1"):
        replace(config, profile_to="traces", profile_from=0)


def test_a_history_of_memory_needs_cuda(start: Callable[..., FSDPEngine], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only CUDA records a memory history"):
        start(profile_to=str(tmp_path), profile_memory=True)


@pytest.mark.skipif(
    not Path("/proc/self").exists(), reason="needs /proc (Linux), which root cannot write to either"
)
def test_profile_folder_that_cannot_be_written_is_refused(
    start: Callable[..., FSDPEngine],
) -> None:
    with pytest.raises(ConfigError, match="profile_to is /proc/x, which cannot be written: "):
        start(profile_to="/proc/x")
