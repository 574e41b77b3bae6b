"""Servers that join and leave a sampler while it is used."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import cast

import pytest

from packages.trainer.tests.rollout.vllm.test_server_process import (
    REQUESTS,
    SPEC,
    FakeReplica,
    completion_of,
)
from temper_trainer.metrics.timeline import RolloutTrace
from temper_trainer.rollout.async_sampler import AsyncSampler, Cohort
from temper_trainer.rollout.sampler import ReplicaError
from temper_trainer.rollout.vllm.remote_server import AddressWatch, RemoteServer
from temper_trainer.rollout.vllm.vllm_sampler import VllmSampler
from temper_trainer.rollout.weight_channel import DeviceLocation
from temper_trainer.types import Completion, SamplingRequest
from temper_trainer.weight_sync.transport_factory import _locate_receivers


class RemoteReplica(FakeReplica):
    """A server that others have started; it dies when `dies` is set."""

    dies = False
    is_closed = False

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.can_restart = False
        self.address = f"10.0.0.{number}:8100"

    def call(self, method: str, *arguments: object) -> "Future[object]":
        if not self.dies and method == "load":
            return super().call(method, *arguments)
        future: Future[object] = Future()
        if self.dies:
            future.set_exception(ReplicaError(f"{self.name} died"))
        else:
            answers = {
                "compute_logprobs": [[-1.0]],
                "cached_version": 1,
                "device_locations": [("a", None)],
            }
            future.set_result(answers[method])
        return future

    def close(self) -> None:
        self.is_closed = True


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def make_sampler(*replicas: RemoteReplica, join_timeout_s: float = 30) -> VllmSampler:
    sampler = VllmSampler(replicas, spec=SPEC, max_restarts=0, join_timeout_s=join_timeout_s)
    sampler.load(lambda replica: replica.call("load", 1), version=1)
    return sampler


def add_when_empty(sampler: VllmSampler, replica: RemoteReplica) -> threading.Thread:
    def add() -> None:
        wait_until(lambda: not sampler.replicas)
        sampler.add(replica)

    thread = threading.Thread(target=add, daemon=True)
    thread.start()
    return thread


def test_comparison_of_logprobs_waits_for_a_server_if_all_have_left() -> None:
    first, second = RemoteReplica(0), RemoteReplica(1)
    sampler = make_sampler(first)
    first.dies = True
    thread = add_when_empty(sampler, second)
    assert sampler.compute_logprobs([(2, 3)], temperature=1.0) == [[-1.0]]
    assert (sampler.replicas, second.loaded) == ((second,), [1])
    thread.join()


def test_weights_wait_for_a_server_if_all_have_left() -> None:
    first, second = RemoteReplica(0), RemoteReplica(1)
    sampler = make_sampler(first)
    # Sent weights are stored nowhere, so the second server cannot load them when it joins.
    problem = sampler.load_while_sending(
        lambda replica: replica.call("load", 2), lambda: "", version=2, reload=None
    )
    assert not problem
    first.dies = True
    thread = add_when_empty(sampler, second)
    sampler.restart_dead()
    assert sampler.replicas == (second,)
    thread.join()


def test_waiting_for_a_server_ends_with_the_join_timeout() -> None:
    first = RemoteReplica(0)
    sampler = make_sampler(first, join_timeout_s=0.05)
    first.dies = True
    with pytest.raises(ReplicaError, match="all servers have left"):
        sampler.restart_dead()
    with pytest.raises(ReplicaError, match="no server with the current weights is left"):
        sampler.compute_logprobs([(2, 3)], temperature=1.0)


def start_watch(
    lists: Callable[[], Sequence[str]],
    sampler: VllmSampler,
    *connected: RemoteReplica,
    connect: Callable[[str], RemoteReplica],
) -> AddressWatch:
    watch = AddressWatch(
        lists,
        connected=cast("Sequence[RemoteServer]", connected),
        connect=cast("Callable[[str], RemoteServer]", connect),
        interval_s=0.001,
    )
    watch.start(sampler)
    return watch


def test_server_leaves_if_two_lists_in_a_row_lack_it(caplog: pytest.LogCaptureFixture) -> None:
    first, second = RemoteReplica(0), RemoteReplica(1)
    sampler = make_sampler(first, second)
    both = [first.address, second.address]
    lists = iter([both, [], [], both[:1], both, both[1:], both])
    state: list[tuple[object, ...]] = []

    def read() -> Sequence[str]:
        state.append(sampler.replicas)
        return next(lists, both[1:])

    def connect(address: str) -> RemoteReplica:
        raise AssertionError(address)

    watch = start_watch(read, sampler, first, second, connect=connect)
    wait_until(lambda: first.is_closed)
    watch.stop()
    # Seven lists, none of which is the second that lacks a server, and the first of the others.
    assert state[:9] == [(first, second)] * 9
    assert not second.is_closed
    assert sampler.replicas == (second,)
    assert caplog.text.count("the list of servers is empty") == 1


def test_server_that_fails_when_it_joins_is_closed_and_connected_again() -> None:
    """The only server has left, so a request loads the weights into one that joins."""
    first = RemoteReplica(0)
    sampler = make_sampler(first)
    sampler.remove(first)
    request = threading.Thread(
        target=sampler.compute_logprobs, args=([(2, 3)],), kwargs={"temperature": 1.0}, daemon=True
    )
    request.start()
    made: list[RemoteReplica] = []

    def connect(address: str) -> RemoteReplica:
        if not made:
            made.append(RemoteReplica(0))
            raise KeyError("unexpected")
        made.append(RemoteReplica(1))
        made[-1].dies = len(made) == 2
        return made[-1]

    watch = start_watch(lambda: ["10.0.0.1:8100"], sampler, connect=connect)
    wait_until(lambda: len(made) == 3 and sampler.replicas == (made[2],))
    request.join(timeout=30)
    watch.stop()
    assert [each.is_closed for each in made[1:]] == [True, False]


def test_only_server_that_joins_loads_the_weights_when_a_request_waits() -> None:
    # Not when it joins: the actor may be training, and would send weights at the same time.
    first, second = RemoteReplica(0), RemoteReplica(1)
    sampler = make_sampler(first)
    sampler.remove(first)
    sampler.add(second)
    assert second.loaded == []
    sampler.compute_logprobs([(2, 3)], temperature=1.0)
    assert second.loaded == [1]


def test_server_that_leaves_is_interrupted_with_the_others() -> None:
    interrupted: list[str] = []

    class Busy(RemoteReplica):
        def sample(self, requests: Sequence[SamplingRequest]) -> "Future[list[Completion]]":
            self.requests, self.future = requests, Future[list[Completion]]()
            return self.future

        def call(self, method: str, *arguments: object) -> "Future[object]":
            if method != "interrupt":
                return super().call(method, *arguments)
            interrupted.append(self.name)
            self.future.set_result([completion_of(each) for each in self.requests])
            done: Future[object] = Future()
            done.set_result(None)
            return done

    busy = Busy(0)
    sampler = make_sampler(busy)
    threads = [
        threading.Thread(target=sampler.sample, args=(REQUESTS[:1],), daemon=True),
        threading.Thread(target=sampler.remove, args=(busy,), daemon=True),
    ]
    threads[0].start()
    wait_until(lambda: hasattr(busy, "future"))
    threads[1].start()
    wait_until(lambda: not sampler.replicas)
    sampler.interrupt()
    for thread in threads:
        thread.join(timeout=30)
    assert (interrupted, busy.is_closed) == ([busy.name], True)


def test_waiting_for_a_server_is_not_measured_as_sampling() -> None:
    first, second = RemoteReplica(0), RemoteReplica(1)
    sampler = make_sampler(first)
    sampler.remove(first)
    trace = RolloutTrace()
    joined_at: list[float] = []

    def join() -> None:
        joined_at.append(time.perf_counter())
        sampler.add(second)

    async def sample() -> Completion:
        asyncio.get_running_loop().call_later(0.05, join)
        streaming = AsyncSampler(sampler, max_concurrent=4)
        return await streaming.sample(REQUESTS[0], cohort=Cohort(num_open=1), trace=trace)

    assert tuple(asyncio.run(sample()).tokens) == completion_of(REQUESTS[0]).tokens
    assert [(each.phase, each.begin >= joined_at[0]) for each in trace.spans] == [
        ("sampling", True)
    ]


def test_slow_server_does_not_keep_another_from_joining() -> None:
    first = RemoteReplica(0)
    sampler = make_sampler(first)
    is_released = threading.Event()

    class Slow(RemoteReplica):
        def start(self) -> None:
            is_released.wait(30)

    joined = {"10.0.0.1:8100": Slow(1), "10.0.0.2:8100": RemoteReplica(2)}
    addresses = [first.address, *joined]
    watch = start_watch(lambda: addresses, sampler, first, connect=joined.__getitem__)
    wait_until(lambda: sampler.replicas == (first, joined["10.0.0.2:8100"]))
    is_released.set()
    wait_until(lambda: len(sampler.replicas) == 3)
    watch.stop()


def test_server_that_cannot_receive_weights_is_not_connected_again() -> None:
    first, second = RemoteReplica(0), RemoteReplica(1)
    sampler = make_sampler(first)
    connected: list[str] = []
    num_looks = 0

    def read() -> Sequence[str]:
        nonlocal num_looks
        num_looks += 1
        return [first.address, second.address]

    def connect(address: str) -> RemoteReplica:
        connected.append(address)
        return second

    watch = start_watch(read, sampler, first, connect=connect)
    wait_until(lambda: second in sampler.replicas)
    assert sampler.refuse(second, reason="no rank is on its GPU")
    seen = num_looks
    wait_until(lambda: num_looks > seen + 5)
    watch.stop()
    assert not sampler.refuse(first, reason="it is the last one")
    assert (connected, sampler.replicas, second.is_closed) == ([second.address], (first,), True)


def test_transport_is_chosen_for_the_servers_that_are_left() -> None:
    first, second = RemoteReplica(0), RemoteReplica(1)
    sampler = make_sampler(first, second)
    first.dies = True
    assert _locate_receivers(sampler) == [DeviceLocation(host="a")]
    assert sampler.replicas == (second,)
    second.dies = True
    with pytest.raises(ReplicaError, match="all servers have left before the first weight sync"):
        _locate_receivers(sampler)
