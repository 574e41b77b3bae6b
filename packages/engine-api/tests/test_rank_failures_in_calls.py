"""A rank that raises in a call other than a pass: the others raise too, and name it."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

import pytest
import torch
import torch.distributed as dist

from temper_engine_api.capabilities import Capability
from temper_engine_api.distributed import rank_failures
from temper_engine_api.distributed.process_group import ThreadGroup, gather_objects
from temper_engine_api.errors import CheckpointError, EngineStateError, RankFailedError
from temper_engine_api.topology import Axis, Topology

from .conftest import BigramConfig, BigramEngine
from .rank_processes import run_ranks

CULPRIT = 1
T = TypeVar("T")


class ReplicatedBigram(BigramEngine):
    """The bigram engine in the processes of a group. It writes a checkpoint with collectives."""

    capabilities = BigramEngine.capabilities | {Capability.BACKGROUND_SAVE}

    def _build(self) -> Topology:
        super()._build()
        self.saving_group = ThreadGroup(timeout_s=60.0)
        self.rank, size = dist.get_rank(), dist.get_world_size()
        return Topology(world_size=size, global_rank=self.rank, dp=Axis(size=size, rank=self.rank))

    def _gather_objects(self, item: T) -> list[T]:
        return gather_objects(item)

    def _write_state(self, directory: str) -> list[str]:
        return self._write(directory, group=None)

    def _stage_state(self) -> Callable[[str], list[str]]:
        return partial(self._write, group=self.saving_group.get())

    def _gather_in_background(self, item: T) -> list[T]:
        return self.saving_group.gather(item)

    def _write(self, directory: str, *, group: dist.ProcessGroup | None) -> list[str]:
        dist.all_reduce(torch.zeros(2), group=group)
        self.run_between_collectives()
        dist.all_reduce(torch.zeros(2), group=group)
        self.run_after_collectives()
        return super()._write_state(directory)

    def to(self, device: str, *, model: bool = True, optimizer: bool = True) -> None:
        self._check_can_move(device)
        self.run_between_collectives()

    def _require_adapter(self) -> None:
        """Allow `disable_adapter`."""

    def _disable_adapter(self) -> AbstractContextManager[None]:
        return nullcontext()

    def run_between_collectives(self) -> None:
        """Return at once; tests replace it."""

    def run_after_collectives(self) -> None:
        """Return at once; tests replace it."""


def start(rank: int, folder: str, *, agreement_s: float) -> ReplicatedBigram:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rank_failures.AGREEMENT_S = agreement_s
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    engine = ReplicatedBigram(BigramConfig())
    engine.init_model()
    return engine


def raise_interrupt(*_arguments: object) -> NoReturn:
    raise KeyboardInterrupt("injected")


def raise_out_of_memory(*_arguments: object) -> NoReturn:
    raise torch.OutOfMemoryError("injected")


def raise_disk_is_full(*_arguments: object) -> NoReturn:
    raise OSError("injected: no space left on device")


def save(engine: ReplicatedBigram, folder: str) -> None:
    engine.save_checkpoint(f"{folder}/steps", global_step=1)


def save_and_load(engine: ReplicatedBigram, folder: str) -> None:
    save(engine, folder)
    engine.load_checkpoint(f"{folder}/steps")


def gather(engine: ReplicatedBigram, _folder: str) -> None:
    engine.gather_objects(engine.rank)


def unshard(engine: ReplicatedBigram, _folder: str) -> None:
    engine.unshard_outputs(None, sample_ids=torch.arange(2))


def move(engine: ReplicatedBigram, folder: str) -> None:
    engine.to("cpu")
    gather(engine, folder)


def use_without_adapter(engine: ReplicatedBigram, folder: str) -> None:
    with engine.disable_adapter():
        engine.run_between_collectives()
        gather(engine, folder)


def zero_gradients(engine: ReplicatedBigram, _folder: str) -> None:
    engine.optimizer_zero_grad()
    engine.gather_objects(engine.rank)


def fail_on_one(
    rank: int,
    folder: str,
    call: Callable[[ReplicatedBigram, str], None],
    method: str,
    failure: Callable[..., NoReturn],
) -> None:
    # The other rank does not raise, so the failed one need not wait for it.
    engine = start(rank, folder, agreement_s=0.2)
    if rank == CULPRIT:
        setattr(engine, method, failure)
    begin = time.monotonic()
    with pytest.raises((KeyboardInterrupt, OSError, RuntimeError), match="injected") as caught:
        call(engine, folder)
    assert time.monotonic() - begin < 10.0
    if rank != CULPRIT:
        assert isinstance(caught.value, RankFailedError)
        assert f"rank {CULPRIT} raised in " in str(caught.value)
    with pytest.raises(RankFailedError, match="injected"):
        engine.gather_objects(rank)
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("call", "method", "failure"),
    [
        (save, "run_between_collectives", raise_out_of_memory),
        (save, "run_between_collectives", raise_disk_is_full),
        (gather, "_gather_objects", raise_interrupt),
        (unshard, "_gather_objects", raise_interrupt),
        (move, "run_between_collectives", raise_disk_is_full),
        (use_without_adapter, "run_between_collectives", raise_disk_is_full),
        (save, "run_after_collectives", raise_interrupt),
        (save_and_load, "_read_state", raise_interrupt),
        (zero_gradients, "_zero_gradients", raise_out_of_memory),
    ],
)
def test_other_rank_names_the_failed_one(
    tmp_path: Path,
    call: Callable[[ReplicatedBigram, str], None],
    method: str,
    failure: Callable[..., NoReturn],
) -> None:
    run_ranks(fail_on_one, str(tmp_path), call, method, failure)


def fill_the_disk_of_one(rank: int, folder: str) -> None:
    engine = start(rank, folder, agreement_s=60.0)
    if rank == CULPRIT:
        engine.run_after_collectives = raise_disk_is_full  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="no space left"):
        save(engine, folder)
    assert engine.gather_objects(rank) == [0, 1]
    dist.destroy_process_group()


def test_group_survives_a_full_disk_of_one_rank(tmp_path: Path) -> None:
    run_ranks(fill_the_disk_of_one, str(tmp_path))


def fail_to_read_on_one(rank: int, folder: str) -> None:
    engine = start(rank, folder, agreement_s=60.0)
    save(engine, folder)
    read = engine._read_state
    if rank == CULPRIT:
        engine._read_state = raise_disk_is_full  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="no space left"):
        engine.load_checkpoint(f"{folder}/steps")
    engine._read_state = read  # type: ignore[method-assign]
    engine.load_checkpoint(f"{folder}/steps")
    # The ranks still count the same calls, so an exception of all of them breaks nothing.
    with pytest.raises(ZeroDivisionError), engine.eval_mode():
        raise ZeroDivisionError
    assert engine.gather_objects(rank) == [0, 1]
    dist.destroy_process_group()


def test_group_survives_a_failed_read_of_one_rank(tmp_path: Path) -> None:
    run_ranks(fail_to_read_on_one, str(tmp_path))


def start_saving(engine: ReplicatedBigram, folder: str) -> None:
    engine.save_checkpoint(f"{folder}/steps", global_step=1, in_background=True)


def save_in_background(engine: ReplicatedBigram, folder: str) -> None:
    start_saving(engine, folder)
    engine.finish_saving()


def stage_and_finish(engine: ReplicatedBigram, folder: str) -> None:
    engine.stage_part(folder)
    engine.finish_part()


def fail_in_background_on_one(
    rank: int, folder: str, call: Callable[[ReplicatedBigram, str], None]
) -> None:
    engine = start(rank, folder, agreement_s=0.2)
    if rank == CULPRIT:
        engine.run_between_collectives = raise_out_of_memory  # type: ignore[method-assign]
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="injected") as caught:
        call(engine, folder)
    assert time.monotonic() - begin < 10.0
    if rank != CULPRIT:
        assert isinstance(caught.value, RankFailedError)
        assert f"rank {CULPRIT} raised in the write of a background save" in str(caught.value)
    # The save is lost, but not the engine.
    assert engine.gather_objects(rank) == [0, 1]
    engine.run_between_collectives = lambda: None  # type: ignore[method-assign]
    with pytest.raises(EngineStateError, match=r"injected.* save without in_background"):
        call(engine, folder)
    save(engine, folder)
    dist.destroy_process_group()


@pytest.mark.parametrize("call", [save_in_background, stage_and_finish])
def test_other_saving_thread_names_the_failed_one(
    tmp_path: Path, call: Callable[[ReplicatedBigram, str], None]
) -> None:
    run_ranks(fail_in_background_on_one, str(tmp_path), call)


def interrupt_the_wait_of_one(
    rank: int, folder: str, stage: Callable[..., None], finish: Callable[[ReplicatedBigram], None]
) -> None:
    engine = start(rank, folder, agreement_s=0.2)
    engine.run_after_collectives = lambda: time.sleep(1.0)  # type: ignore[method-assign]
    stage(engine, folder)
    if rank != CULPRIT:
        finish(engine)
        with pytest.raises(RankFailedError, match=f"rank {CULPRIT} raised in finish_.*injected"):
            engine.gather_objects(rank)
    else:
        # As Ctrl-C would, while the thread saves.
        signal.signal(signal.SIGALRM, raise_interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt, match="injected"):
            finish(engine)
        finish(engine)
    assert list(Path(folder).rglob(f"rank_{rank}.pt"))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("stage", "finish"),
    [
        (start_saving, ReplicatedBigram.finish_saving),
        (ReplicatedBigram.stage_part, ReplicatedBigram.finish_part),
    ],
)
def test_save_ends_although_the_wait_of_one_rank_was_interrupted(
    tmp_path: Path, stage: Callable[..., None], finish: Callable[[ReplicatedBigram], None]
) -> None:
    run_ranks(interrupt_the_wait_of_one, str(tmp_path), stage, finish)
