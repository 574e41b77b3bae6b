"""Ranks agree after an exception: all raised at the same point, or every rank names the failure."""

import os
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.distributed_c10d import _coalescing_manager

from temper_engine_api.distributed import rank_failures
from temper_engine_api.distributed.process_group import (
    ThreadGroup,
    join_default_group,
    report_failed_start,
)
from temper_engine_api.distributed.rank_connections import (
    close_connections,
    ends_at_once,
    has_lost_connection,
    list_own_connections,
)
from temper_engine_api.distributed.rank_failures import BuildStage, RankFailures, _watch
from temper_engine_api.errors import (
    CheckpointError,
    CollectiveTimeoutError,
    ConfigError,
    RankFailedError,
)
from temper_engine_api.topology import Axis, Topology

from .rank_processes import run_ranks

STAGES: tuple[BuildStage, ...] = get_args(BuildStage)


def join(rank: int, folder: str, *, num_stages: int = 1, world_size: int = 2) -> RankFailures:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    failures = RankFailures.join()
    assert failures is not None
    failures.mark_engine_built(Topology(world_size=world_size, pp=Axis(size=num_stages)))
    return failures


def call(
    failures: RankFailures,
    *,
    fails: bool,
    num_collectives: int = 1,
    error: Exception | None = None,
) -> None:
    with failures.report_failure("a training call"):
        failures.set_position(" at micro-batch 2 of 3")
        for _ in range(num_collectives if dist.is_initialized() else 0):
            dist.all_reduce(torch.zeros(1), async_op=fails)
        if fails:
            raise error or ValueError("bad sample")


def raise_on_both(rank: int, folder: str) -> None:
    failures = join(rank, folder)
    for _ in range(2):
        with pytest.raises(ValueError, match="bad sample"):
            call(failures, fails=True)
        call(failures, fails=False)
    dist.destroy_process_group()


def test_group_survives_if_all_ranks_raise_after_the_same_collectives(tmp_path: Path) -> None:
    run_ranks(raise_on_both, str(tmp_path))


def raise_on_both_during_a_save(rank: int, folder: str) -> None:
    failures = join(rank, folder)
    background = ThreadGroup(timeout_s=60.0).get()
    # The threads of the two ranks write at different speeds.
    early = dist.all_reduce(torch.zeros(1), group=background, async_op=True) if rank else None
    with pytest.raises(ValueError, match="bad sample"):
        call(failures, fails=True)
    late = early or dist.all_reduce(torch.zeros(1), group=background, async_op=True)
    assert late is not None
    late.wait()
    call(failures, fails=False)
    dist.destroy_process_group()


def test_group_survives_while_a_thread_of_one_rank_is_ahead(tmp_path: Path) -> None:
    run_ranks(raise_on_both_during_a_save, str(tmp_path))


def raise_on_one(rank: int, folder: str) -> None:
    failures = join(rank, folder)
    begin = time.monotonic()
    with pytest.raises(ValueError if rank else RankFailedError, match="bad sample") as caught:
        call(failures, fails=rank == 1, num_collectives=1 - rank)
    assert time.monotonic() - begin < 10.0
    sentence = "rank 1 raised in a training call at micro-batch 2 of 3: ValueError: bad sample. "
    if rank == 0:
        assert str(caught.value).startswith(sentence)
    with pytest.raises(RankFailedError) as later, failures.report_failure("a forward call"):
        raise AssertionError("the call is refused before it begins")
    assert str(later.value).startswith(sentence)
    with failures.report_interrupt("finish_saving()"):
        pass  # close() calls it
    dist.destroy_process_group()


def test_other_rank_names_the_failed_one(tmp_path: Path) -> None:
    run_ranks(raise_on_one, str(tmp_path))


def start(*, fails: bool = False, timeout_s: float = 60.0) -> None:
    with report_failed_start(timeout_s=timeout_s):
        if fails:
            raise FileNotFoundError("no model folder")
        join_default_group(device=torch.device("cpu"), timeout_s=timeout_s)


def fail_before_joining(rank: int, folder: str, port: int) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    begin = time.monotonic()
    expected = FileNotFoundError if rank else RankFailedError
    with pytest.raises(expected, match="no model folder") as caught:
        start(fails=rank == 1)
    assert time.monotonic() - begin < 10.0
    if rank == 0:
        assert str(caught.value).startswith("rank 1 raised in init_model(): FileNotFoundError:")
    assert not dist.is_initialized()
    join_after_an_absence(rank, has_left=Path(folder, "left"))


def join_after_an_absence(rank: int, *, has_left: Path) -> None:
    """Let rank 0 wait without success before rank 1 begins, whose group has another number."""
    if rank == 0:
        with pytest.raises(CollectiveTimeoutError, match=r"\[1\] did not begin to build"):
            start(timeout_s=3.0)
        has_left.touch()
    else:
        while not has_left.exists():
            time.sleep(0.05)
        with pytest.raises(RankFailedError, match=r"\[1\] did not begin to build"):
            start()
    start()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2.0
    dist.destroy_process_group()


def test_rank_that_fails_before_the_group_exists_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    run_ranks(fail_before_joining, str(tmp_path), port)


def test_all_ranks_that_fail_to_build_raise_their_own_errors() -> None:
    store = dist.HashStore()
    ranks = [RankFailures(store, rank=rank, world_size=2) for rank in range(2)]
    errors = [ConfigError("sequence_parallel is 3"), ConfigError("sequence_parallel is 3")]
    with ThreadPoolExecutor(2) as pool:
        for failures, error in zip(ranks, errors, strict=True):
            pool.submit(failures.handle, error, where="init_model()")
    for failures, error in zip(ranks, errors, strict=True):
        failures.check()
        assert not hasattr(error, "__notes__")


LISTENER = """
import socket
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()
    connection.sendall(connection.recv(1))
"""


@contextmanager
def connect_elsewhere() -> Iterator[socket.socket]:
    """Connect to a process that is no rank and returns the first byte."""
    with subprocess.Popen([sys.executable, "-c", LISTENER], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with socket.create_connection(("127.0.0.1", port), timeout=5.0) as connection:
            yield connection


def test_failure_while_building_keeps_connections_to_hosts_without_ranks() -> None:
    store = dist.HashStore()
    failures, other = (RankFailures(store, rank=rank, world_size=2) for rank in range(2))
    other.publish_connections({"10.0.0.9:80 10.0.0.1:70"})
    with connect_elsewhere() as unrelated:
        failures.handle(RuntimeError("Connection reset by peer"), where="init_model()")
        unrelated.sendall(b"x")
        assert unrelated.recv(1) == b"x"


def test_missing_rank_is_named_when_the_time_is_over() -> None:
    failures = RankFailures(dist.HashStore(), rank=0, world_size=2)
    with pytest.raises(CollectiveTimeoutError, match=r"ranks \[1\] did not begin to build"):
        failures.wait_for_arrivals("begin to build", timeout_s=0.1)


class LateRankStore(dist.HashStore):
    """Store in which rank 1 arrives right after rank 0 has looked for all ranks."""

    def check(self, keys: list[str]) -> bool:
        are_here = super().check(keys)
        if len(keys) == 2:
            self.set(keys[1], "")
        return are_here


def test_rank_that_arrives_at_the_deadline_is_not_missing() -> None:
    failures = RankFailures(LateRankStore(), rank=0, world_size=2)
    failures.wait_for_arrivals("begin to build", timeout_s=0.0)


def test_exception_is_reported_once() -> None:
    # The context around the call must not wait for the rank that has caught its exception.
    store = dist.HashStore()
    first, second = (RankFailures(store, rank=rank, world_size=2) for rank in range(2))

    def fail(failures: RankFailures) -> None:
        with failures.report_failure("train_mode()"):
            try:
                with failures.report_failure("a training call"):
                    raise ValueError("bad sample")
            except ValueError:
                if failures is first:
                    raise

    with ThreadPoolExecutor(2) as pool:
        ended = [pool.submit(fail, failures) for failures in (first, second)]
    assert isinstance(ended[0].exception(), ValueError)
    assert ended[1].exception() is None
    for failures in (first, second):
        failures.check()


def raise_after_other_collectives(rank: int, folder: str) -> None:
    failures = join(rank, folder)
    with pytest.raises(ValueError, match="bad sample"):
        call(failures, fails=True, num_collectives=rank)
    with pytest.raises(RankFailedError, match="build a new engine"):
        failures.check()
    # A process that exits while a thread of gloo is at work in a group ends with SIGABRT.
    dist.destroy_process_group()


def test_group_breaks_if_ranks_have_started_different_collectives(tmp_path: Path) -> None:
    run_ranks(raise_after_other_collectives, str(tmp_path))


def call_stages(failures: RankFailures, *, fails: bool) -> None:
    with failures.report_failure("a training call"), failures.track_messages():
        if fails:
            raise ValueError("bad sample")


def raise_in_stages(rank: int, folder: str) -> None:
    failures = join(rank, folder, num_stages=2)
    with pytest.raises(ValueError, match="bad sample"):
        call_stages(failures, fails=True)
    with pytest.raises(RankFailedError):
        failures.check()
    dist.destroy_process_group()


def test_group_of_pipeline_stages_breaks_during_a_pass(tmp_path: Path) -> None:
    run_ranks(raise_in_stages, str(tmp_path))


def raise_between_stages(rank: int, folder: str) -> None:
    failures = join(rank, folder, num_stages=2)
    for _ in range(2):
        call_stages(failures, fails=False)
        with pytest.raises(ValueError, match="bad sample"):
            call(failures, fails=True)
    call(failures, fails=False)
    dist.destroy_process_group()


def test_group_of_pipeline_stages_survives_outside_of_a_pass(tmp_path: Path) -> None:
    run_ranks(raise_between_stages, str(tmp_path))


def test_call_in_a_pass_keeps_position_and_messages() -> None:
    failures = RankFailures(dist.HashStore(), rank=0, world_size=2)
    failures._has_stages = True
    with failures.report_failure("train_mode()"):
        with failures.report_failure("forward_backward_batch()"), failures.track_messages():
            failures.set_position(" at micro-batch 2 of 3")
            with failures.report_failure("gather_objects()"):
                assert (failures._position, failures._may_have_messages) == ("", True)
            assert failures._position == " at micro-batch 2 of 3"
            assert failures._may_have_messages
        assert not failures._may_have_messages


def test_calls_inside_of_a_call_do_not_change_the_numbers_of_later_ones() -> None:
    store = dist.HashStore()
    ranks = [RankFailures(store, rank=rank, world_size=2) for rank in range(2)]
    for rank, failures in enumerate(ranks):
        with failures.report_failure("write_part()"):
            for _ in range(rank):
                with failures.report_failure("gather_objects()"):
                    pass
    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(call, failures, fails=True) for failures in ranks]
    assert all(isinstance(result.exception(), ValueError) for result in results)
    for failures in ranks:
        failures.check()


class LostStore(dist.HashStore):
    """Store whose process has ended, as soon as `is_lost` is set."""

    is_lost = False

    def set(self, key: str, value: str) -> None:
        self._raise_if_lost()
        super().set(key, value)

    def check(self, keys: list[str]) -> bool:
        self._raise_if_lost()
        return super().check(keys)

    def _raise_if_lost(self) -> None:
        if self.is_lost:
            raise dist.DistNetworkError("Connection reset by peer")


def write_without_store(error: OSError | None) -> RankFailures:
    store = LostStore()
    failures = RankFailures(store, rank=0, world_size=2)
    with failures.report_unfinished("write_part()", timeout_s=5.0):
        store.is_lost = True
        if error is not None:
            raise error
    return failures


def test_part_that_ends_without_the_store_stays_finished() -> None:
    write_without_store(None).check()


def test_error_of_a_part_is_raised_although_the_store_is_lost() -> None:
    with pytest.raises(OSError, match="no space left") as caught:
        write_without_store(OSError("no space left"))
    assert "rank 0 lost the connection to the store" in str(caught.value.__notes__)


def fail_to_write_on_one_of_three(rank: int, folder: str, num_collectives: int) -> None:
    failures = join(rank, folder, world_size=3)
    # gloo also counts messages, which rank 1 has no part in.
    for _ in range(2):
        if rank == 0:
            dist.send(torch.zeros(1), 2)
        elif rank == 2:
            dist.recv(torch.zeros(1), 0)

    def write() -> None:
        with failures.report_unfinished("write_part()", timeout_s=30.0):
            for number in range(2):
                if rank == 1 and number == num_collectives:
                    raise OSError("no space left")
                dist.all_reduce(torch.zeros(1))
            if rank == 1:
                raise OSError("no space left")

    begin = time.monotonic()
    if rank == 1:
        with pytest.raises(OSError, match="no space left"):
            write()
    elif num_collectives == 2:
        write()
    else:
        with pytest.raises(RankFailedError, match=r"rank 1 raised in write_part\(\): OSError"):
            write()
    assert time.monotonic() - begin < 10.0
    if num_collectives == 2:
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 3.0
        failures.check()
    dist.destroy_process_group()


@pytest.mark.parametrize("num_collectives", [1, 2])
def test_failed_write_breaks_the_group_only_if_another_rank_waits(
    tmp_path: Path, num_collectives: int
) -> None:
    run_ranks(fail_to_write_on_one_of_three, str(tmp_path), num_collectives, num_ranks=3)


def test_rank_whose_saving_thread_had_ended_learns_of_a_failed_one() -> None:
    store = dist.HashStore()
    first, second = (
        RankFailures(store, rank=rank, world_size=2).join_in_background(set()) for rank in range(2)
    )
    second._leave_broken_group(second._declare("rank 1 raised in the write"))
    first.check()
    with pytest.raises(
        RankFailedError, match=r"rank 1 raised in the write.* without in_background"
    ):
        first.check_store()


def test_ends_of_earlier_parts_are_deleted() -> None:
    store = dist.HashStore()
    failures = RankFailures(store, rank=0, world_size=2)
    num_keys = []
    for _ in range(5):
        with failures.report_unfinished("write_part()", timeout_s=5.0):
            pass
        num_keys.append(store.num_keys())
    assert num_keys[1:] == [num_keys[1]] * 4


def test_error_of_a_background_save_is_not_reported_again() -> None:
    # The other rank raises it in its own time, which may be later than AGREEMENT_S.
    failures = RankFailures(dist.HashStore(), rank=0, world_size=2)
    begin = time.monotonic()
    with (
        pytest.raises(CheckpointError),
        failures.report_failure("save_checkpoint()"),
        failures.report_interrupt("finish_saving()"),
    ):
        raise CheckpointError("step 1 could not be saved")
    assert time.monotonic() - begin < 1.0
    failures.check()


def build_after_a_failure(rank: int, folder: str) -> None:
    raise_in_stages(rank, folder)
    raise_on_both(rank, folder + "/next")


def test_new_group_is_usable_after_a_broken_one(tmp_path: Path) -> None:
    (tmp_path / "next").mkdir()
    run_ranks(build_after_a_failure, str(tmp_path))


def test_call_that_ends_after_a_declaration_raises() -> None:
    """Check the end of a call, because an aborted collective of a device raises no error."""
    store = dist.HashStore()
    first, second = (
        RankFailures(store, rank=rank, world_size=2, watches=True) for rank in range(2)
    )
    returned = []

    def end_after_a_declaration() -> None:
        with first.report_failure("an update"):
            with pytest.raises(RuntimeError), second.report_failure("an update"):
                raise RuntimeError("Connection reset by peer")
            returned.append("norm")

    with pytest.raises(RankFailedError, match="rank 1 raised in an update: RuntimeError: Conn"):
        end_after_a_declaration()
    assert returned == ["norm"]
    with pytest.raises(RankFailedError, match="rank 1 raised"):
        first.check()


def test_device_collectives_are_aborted_together_and_those_of_the_failed_rank_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check the order without a device: an abort frees memory that kernels of other ranks read."""
    store = dist.HashStore()
    ranks = [RankFailures(store, rank=rank, world_size=3) for rank in range(3)]
    events = list[str]()

    def abort() -> None:
        events.append(f"{threading.current_thread().name} aborts")
        time.sleep(0.1)
        events.append(f"{threading.current_thread().name} has aborted")

    def learn(rank: int, *, after_s: float) -> None:
        time.sleep(after_s)
        events.append(f"rank {rank} learns")
        with pytest.raises(RankFailedError, match="rank 2 raised in an update"):
            ranks[rank].check_store()

    def fail() -> None:
        with pytest.raises(RuntimeError), ranks[2].report_failure("an update"):
            raise RuntimeError("bad sample")

    monkeypatch.setattr(rank_failures, "has_device_groups", lambda: True)
    monkeypatch.setattr(rank_failures, "abort_device_collectives", abort)
    monkeypatch.setattr(rank_failures, "AGREEMENT_S", 0.1)
    threads = [
        threading.Thread(name="rank 0", target=learn, args=(0,), kwargs={"after_s": 0.3}),
        threading.Thread(name="rank 1", target=learn, args=(1,), kwargs={"after_s": 0.6}),
        threading.Thread(name="rank 2", target=fail),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert events[:2] == ["rank 0 learns", "rank 1 learns"]
    assert set(events[2:6]) == {
        f"rank {rank} {event}" for rank in range(2) for event in ("aborts", "has aborted")
    }
    assert events[6:] == ["rank 2 aborts", "rank 2 has aborted"]


def test_rank_does_not_wait_for_the_abort_of_one_that_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failures = RankFailures(dist.HashStore(), rank=0, world_size=2)
    aborts = list[float]()
    monkeypatch.setattr(rank_failures, "has_device_groups", lambda: True)
    monkeypatch.setattr(
        rank_failures, "abort_device_collectives", lambda: aborts.append(time.monotonic())
    )
    begin = time.monotonic()
    with pytest.raises(RuntimeError), failures.report_failure("an update"):
        raise RuntimeError("Connection reset by peer")  # with it, the rank agrees within 1 s
    assert len(aborts) == 1
    assert aborts[0] - begin < 10  # a busy machine; 4 s on an idle one


def test_rank_that_arrives_after_the_declaration_learns_of_it() -> None:
    store = dist.HashStore()
    first = RankFailures(store, rank=0, world_size=2)
    error = RuntimeError("Connection reset by peer")  # with it, the rank waits for 1 s only
    first.handle(error, where="init_model()")
    late = RankFailures(store, rank=1, world_size=2)
    with pytest.raises(RankFailedError, match="rank 0 raised in init_model"):
        late.wait_for_arrivals("begin to build", timeout_s=5.0)


def build(store: dist.Store) -> list[RankFailures]:
    ranks = [RankFailures(store, rank=rank, world_size=2) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for stage in STAGES:
            waits = [pool.submit(each.wait_for_arrivals, stage, timeout_s=5.0) for each in ranks]
            for wait in waits:
                wait.result()
    return ranks


def test_rank_that_was_absent_learns_of_the_failed_start_and_then_meets_the_others() -> None:
    store = dist.HashStore()
    waiting = RankFailures(store, rank=0, world_size=2)
    with pytest.raises(CollectiveTimeoutError) as caught:
        waiting.wait_for_arrivals("begin to build", timeout_s=0.1)
    waiting.handle(caught.value, where="init_model()")
    absent = RankFailures(store, rank=1, world_size=2)
    # Rank 0 was here, but has left: this rank must not go on to create a group with it.
    with pytest.raises(RankFailedError, match=r"rank 0 raised .* \[1\] did not begin to build"):
        absent.wait_for_arrivals("begin to build", timeout_s=5.0)
    for failures in build(store):
        failures.check()


def test_rank_whose_engine_is_built_first_can_close_the_connections_of_the_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        own = socket.create_connection(server.getsockname(), timeout=5.0)
        other_end, _ = server.accept()
    with own, other_end:
        first, _ = build(dist.HashStore())
        first.mark_engine_built(Topology(world_size=2))
        first.handle(RuntimeError("Connection reset by peer"), where="a training call")
        assert own.recv(1) == b""


def fail_in_one_of_two_engines(rank: int, folder: str) -> None:
    first = join(rank, folder)
    later_group = dist.new_group(timeout=timedelta(seconds=15))
    second = RankFailures.join()
    assert second is not None
    second.mark_engine_built(Topology(world_size=2))
    released = Path(folder, "released")
    if rank == 1:
        with pytest.raises(ValueError, match="bad sample"):
            call(first, fails=True, num_collectives=0)
        while not released.exists():  # the end of this process would close its connections
            time.sleep(0.05)
    else:
        begin = time.monotonic()
        with (
            pytest.raises(RankFailedError, match=r"rank 1 raised .* bad sample"),
            second.report_failure("a forward call"),
        ):
            dist.all_reduce(torch.zeros(1), group=later_group)
        released.touch()
        assert time.monotonic() - begin < 10.0
    for failures in (first, second):
        with pytest.raises(RankFailedError, match="rank 1 raised"):
            call(failures, fails=False)
    dist.destroy_process_group()


def test_rank_that_waits_in_another_engine_of_the_group_is_released(tmp_path: Path) -> None:
    run_ranks(fail_in_one_of_two_engines, str(tmp_path))


def test_failure_closes_the_connections_of_an_engine_that_is_being_built() -> None:
    store = dist.HashStore()
    first = RankFailures(store, rank=0, world_size=2)
    first.mark_engine_built(Topology(world_size=2))
    second = RankFailures(store, rank=0, world_size=2, group=first._group)
    with connect_elsewhere() as connection:
        first.handle(RuntimeError("Connection reset by peer"), where="a training call")
        assert connection.recv(1) == b""
    with pytest.raises(RankFailedError):
        second.check()


def test_failed_start_that_all_ranks_survive_keeps_later_connections() -> None:
    store = dist.HashStore()
    first = RankFailures(store, rank=0, world_size=2)
    first.mark_engine_built(Topology(world_size=2))
    second = RankFailures(store, rank=0, world_size=2, group=first._group)
    second.start_failed()
    with connect_elsewhere() as connection:
        first.handle(RuntimeError("Connection reset by peer"), where="a training call")
        connection.sendall(b"x")
        assert connection.recv(1) == b"x"


def test_exception_object_that_is_raised_again_is_reported_again() -> None:
    store = dist.HashStore()
    ranks = [RankFailures(store, rank=rank, world_size=2) for rank in range(2)]
    error = ValueError("bad sample")
    results = []
    for failing in ((0, 1), (0,)):
        with ThreadPoolExecutor(2) as pool:
            results += [pool.submit(call, ranks[rank], fails=True, error=error) for rank in failing]
    assert all(result.exception() is error for result in results)
    with pytest.raises(RankFailedError, match=r"rank 0 raised .* bad sample"):
        ranks[0].check()


def test_watching_thread_leaves_the_group_when_the_store_is_lost() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    failures = RankFailures(client, rank=1, world_size=2, watches=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        del store
        _watch(weakref.ref(failures))
    finally:
        dist.destroy_process_group()
    with pytest.raises(RankFailedError, match="rank 1 lost the connection to the store"):
        failures.check()


def test_call_that_ends_without_the_store_names_the_lost_store() -> None:
    store = LostStore()
    # With NCCL the end of a call looks for a declaration.
    failures = RankFailures(store, rank=0, world_size=2, watches=True)
    with (
        pytest.raises(RankFailedError, match="rank 0 lost the connection to the store"),
        failures.report_failure("a training call"),
    ):
        store.is_lost = True


def end_first_rank(*, error: BaseException) -> None:
    """Raise on rank 0 after it has learned that rank 1 broke the group, and aborted collectives."""
    store = dist.HashStore()
    first, second = (
        RankFailures(store, rank=rank, world_size=2, watches=True) for rank in range(2)
    )
    with first.report_failure("an update"):
        with pytest.raises(RuntimeError), second.report_failure("an update"):
            raise RuntimeError("Connection reset by peer")
        with suppress(RankFailedError), first.report_failure("a gather"):
            pass
        raise error


def test_error_after_an_aborted_collective_names_the_failed_rank() -> None:
    # A shape that was never received can be anything.
    error = RuntimeError("Trying to create tensor with negative dimension -3")
    with pytest.raises(RankFailedError, match="rank 1 raised in an update") as caught:
        end_first_rank(error=error)
    assert caught.value.__cause__ is error


def test_interrupt_after_an_aborted_collective_stays_an_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        end_first_rank(error=KeyboardInterrupt())
    assert "rank 1 raised in an update" in str(caught.value.__notes__)


def interrupt_batch(rank: int, folder: str) -> None:
    failures = join(rank, folder)

    def fail() -> None:
        with failures.report_failure("a training call"), _coalescing_manager():
            dist.all_reduce(torch.zeros(1))
            raise ValueError("bad sample")

    with pytest.raises(ValueError, match="bad sample"):
        fail()
    total = torch.ones(1)
    with _coalescing_manager():
        dist.all_reduce(total)
    assert total.item() == 2.0
    dist.destroy_process_group()


def test_batch_of_collectives_that_was_interrupted_is_ended(tmp_path: Path) -> None:
    # Otherwise later collectives of the same thread would wait for the end of this batch.
    run_ranks(interrupt_batch, str(tmp_path))


def test_single_process_needs_no_agreement() -> None:
    assert RankFailures.join() is None


class ResetsBeforeItAnswers(set[str]):
    """Connections whose other end is reset while `close_connections` looks one up."""

    def __init__(self, connections: set[str], other_end: socket.socket) -> None:
        super().__init__(connections)
        self._other_end = other_end

    def __contains__(self, connection: object) -> bool:
        if super().__contains__(connection):
            # With this option, close() resets the connection instead of ending it in order.
            self._other_end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._other_end.close()
            return True
        return False


def test_connection_that_was_reset_meanwhile_does_not_end_the_closing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        own = socket.create_connection(server.getsockname())
        other_end, _ = server.accept()
    name = "{}:{} {}:{}".format(*other_end.getsockname(), *other_end.getpeername())
    with own:
        assert name in list_own_connections()
        close_connections(ResetsBeforeItAnswers({name}, other_end))
        with pytest.raises(OSError, match="reset by peer"):
            own.recv(1)


def make_checkpoint_error(cause: Exception) -> CheckpointError:
    error = CheckpointError("could not write the checkpoint")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:28572"), True),
        (CollectiveTimeoutError("rank 0 timed out in all_reduce"), True),
        (dist.DistStoreError("timed out after 3 s waiting for keys"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (
            RuntimeError("NCCL error: ncclRemoteError: A call failed possibly due to a network"),
            True,
        ),
        (ValueError("Connection closed"), False),
        (CheckpointError("s3://bucket/run: Connection reset by peer"), False),
        (make_checkpoint_error(RuntimeError("Connection closed by peer")), True),
        (make_checkpoint_error(OSError("Connection timed out")), False),
    ],
)
def test_lost_connections_are_recognized(error: BaseException, is_lost: bool) -> None:
    assert has_lost_connection(error) is is_lost


@pytest.mark.parametrize(
    ("error", "at_once"),
    [
        (KeyboardInterrupt(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), False),
        (make_checkpoint_error(RuntimeError("Connection closed by peer")), True),
        (make_checkpoint_error(RuntimeError("file write failed")), False),
        (OSError("No space left on device"), False),
        # DCP raises it on all ranks after its collectives.
        (CheckpointException("write", {}), False),
    ],
)
def test_errors_that_need_not_wait_for_other_ranks_are_recognized(
    error: BaseException, at_once: bool
) -> None:
    assert ends_at_once(error) is at_once
