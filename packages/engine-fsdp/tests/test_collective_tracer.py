"""Test that a collective timeout names rank, stage and collective; other errors stay the same."""

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from temper_engine_fsdp.runtime.collective_tracer import CollectiveTracer
from temper_engine_fsdp.runtime.process_group import Membership

SCRIPT = Path(__file__).with_name("wait_as_rank.py")


@pytest.mark.slow
def test_timeout_error_names_the_collective_and_the_stages_of_other_ranks(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = {
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(tmp_path / "log")],
            env={**os.environ, **meeting, "RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        assert ranks[0].wait(timeout=200) == 0
    finally:
        ranks[1].kill()
        ranks[1].wait()
    log = (tmp_path / "log").read_text()
    assert re.match(
        r"rank 0 timed out in [a-z_]+ during a training call \(micro-batch 1 of 1\), "
        r"\d+ s after it began "
        r"\(collective_timeout_s is 15\)\. Rank 1 is in between calls since \d+ s\.",
        log,
    ), log
    begun = (tmp_path / "log.begun").read_text()
    assert re.fullmatch(r"[a-z_]+ of \[\[\d+.*\]\] in group \w+", begun), begun


def standalone_tracer() -> CollectiveTracer:
    return CollectiveTracer(
        Membership(rank=0, world_size=1, device=torch.device("cpu"), owns_group=False),
        timeout_s=1.0,
    )


def test_errors_without_a_timeout_are_not_changed() -> None:
    stages = standalone_tracer()
    for error in (RuntimeError("out of memory"), KeyError("labels")):
        with pytest.raises(type(error), match=str(error.args[0])), stages.stage("a training call"):
            raise error


def test_stage_lasts_until_the_device_has_finished_it() -> None:
    stages, is_done = standalone_tracer(), [False, False]
    for i, name in enumerate(("a training call", "the update")):
        with stages.stage(name):
            stages.detail = f"micro-batch {i + 1}"
            stages.track_on_device(lambda i=i: is_done[i])  # type: ignore[misc]
    assert str(stages._oldest_unfinished()) == "a training call (micro-batch 1)"
    is_done[0] = True
    assert str(stages._oldest_unfinished()) == "the update (micro-batch 2)"
    is_done[1] = True
    assert stages._oldest_unfinished() is None


def test_nested_stages_count_as_the_outer_one() -> None:
    stages, seen = standalone_tracer(), []
    with stages.stage("saving a checkpoint"):
        with stages.stage("an exchange of objects"):
            seen.append(stages._current_stage)
        seen.append(stages._current_stage)
    assert [*seen, stages._current_stage] == [
        "saving a checkpoint",
        "saving a checkpoint",
        "between calls",
    ]
    assert stages._since <= time.time()
