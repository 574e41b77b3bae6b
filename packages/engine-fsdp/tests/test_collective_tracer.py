"""Test that a collective timeout names rank, stage and collective; other errors stay the same."""

import os
import re
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from temper_engine_api.batch import from_sequences
from temper_engine_api.conformance.harness.rank import Rank
from temper_engine_api.conformance.harness.rank_pool import RankPool
from temper_engine_api.conformance.inputs.probes import SftProbe
from temper_engine_api.errors import CollectiveTimeoutError
from temper_engine_api.layout import default_layout
from temper_engine_api.specs import ModelSpec, PrecisionSpec
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.engine import FSDPEngine
from temper_engine_fsdp.runtime.collective_tracer import (
    CollectiveTracer,
    find_unfinished_collective,
)
from temper_engine_fsdp.runtime.process_group import Membership

ARCHITECTURE = {
    "model_type": "qwen2",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.slow
def test_timeout_error_names_the_collective_and_the_stages_of_other_ranks(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rank_pool.run(
        train_on_the_first_rank,
        engine="fsdp",
        layout=default_layout(2),
        arguments={"file": tmp_path / "log", "port": port},
    )
    log = (tmp_path / "log").read_text()
    assert re.match(
        r"rank 0 timed out in [a-z_]+ during a training call \(micro-batch 1 of 1\), "
        r"\d+ s after it began "
        r"\(collective_timeout_s is 15\)\. Rank 1 is in between calls since \d+ s\.",
        log,
    ), log
    begun = (tmp_path / "log.begun").read_text()
    assert re.fullmatch(r"[a-z_]+ of \[\[\d+.*\]\] in group \w+", begun), begun


def train_on_the_first_rank(rank: Rank, *, file: Path, port: int) -> None:
    """Write the error message of the first rank to a file, while the other one does not train.

    The file with the suffix .begun gets the unfinished collective that torch's flight recorder
    reported while the rank waited.
    """
    # The engine creates its own group, which has its timeout.
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    engine = FSDPEngine(
        FSDPConfig(
            model=ModelSpec(architecture=ARCHITECTURE),
            precision=PrecisionSpec(compute="fp32"),
            device="cpu",
            collective_timeout_s=15.0,
        )
    )
    engine.init_model()
    engine.set_loss_fn(SftProbe())
    if rank.index == 1:
        while not file.exists():
            time.sleep(0.1)
        return
    batch = from_sequences([torch.arange(9)] * 2, loss_masks=[torch.arange(9) >= 2] * 2)
    is_over = threading.Event()
    arguments = (file.with_suffix(".begun"), is_over)
    logger = threading.Thread(target=log_unfinished_collective, args=arguments)
    logger.start()
    try:
        with pytest.raises(CollectiveTimeoutError) as caught, engine.train_mode():
            engine.forward_backward_batch(
                engine.shard_data(batch, max_tokens=64), forward_only=False
            )
    finally:
        is_over.set()
        logger.join()
    file.write_text(str(caught.value))


def log_unfinished_collective(file: Path, is_over: threading.Event) -> None:
    """Write the unfinished collective to a file once it is the same for a second.

    A busy host may take long to reach it.
    """
    before, begun = "", find_unfinished_collective()
    while (begun == "a collective" or begun != before) and not is_over.wait(1.0):
        before, begun = begun, find_unfinished_collective()
    file.write_text(begun)


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
