"""Test that the rank pool names a rank that raises, dies or hangs, and works afterwards."""

import os
import pickle
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from staged_oracle import CONFORMANCE_LAYOUTS

from temper_engine_api.conformance.harness.rank_pool import RankFailureError, RankPool
from temper_engine_api.conformance.harness.rank_process import JobReply, pickle_reply
from temper_engine_api.conformance.inputs.tiny_models import QWEN2_GROUPED
from temper_engine_api.layout import default_layout

ANY_ENGINE = "temper_engine_api.engine:BaseEngine"
"""Engine named in the requests; the jobs of this file build none."""
_CACHED: Callable[[], object | None] = object
"""Weak reference to the cached engine of a rank."""


def who_am_i(rank, *, add):
    total = torch.tensor(rank.index + add)
    dist.all_reduce(total)
    return rank.index, rank.world_size, dist.get_world_size(), int(total)


def raise_on(rank, *, index):
    if rank.index == index:
        raise ZeroDivisionError("a fault of this rank")
    return "fine"


def raise_while_others_wait(rank):
    if rank.index == 0:
        raise ZeroDivisionError("a fault of this rank")
    dist.barrier()


def die(rank):
    if rank.index == 1:
        os._exit(3)
    dist.barrier()


def sleep_long(rank):
    time.sleep(60 if rank.index == 1 else 0)


def leave_only_together(rank):
    """Make this rank's process group end only if all ranks end it, as NCCL's may."""
    end = dist.destroy_process_group

    def together():
        dist.destroy_process_group = end
        dist.monitored_barrier(timeout=timedelta(seconds=5))
        end()

    dist.destroy_process_group = together


def hash_of(rank, *, word):
    return hash(word)


def build(rank, *, setup):
    rank.temporary_engine(setup)


def cache_engine_in_a_cycle(rank, *, setup):
    """Make later jobs of this rank freeze an engine that only the garbage collector frees."""
    global _CACHED
    engine = rank.cached_engine(setup)
    engine.itself = engine
    _CACHED = weakref.ref(engine)
    sys.modules.update({f"_new_module_{i}": ModuleType(f"_new_module_{i}") for i in range(200)})


def has_cached_engine(rank):
    return _CACHED() is not None


@pytest.fixture(scope="module")
def rank_pool(shared):
    return shared.rank_pool


def run(rank_pool, job, *, world_size=2, **arguments):
    return rank_pool.run(
        job, engine=ANY_ENGINE, layout=default_layout(world_size), arguments=arguments
    )


def test_results_are_in_rank_order_at_every_world_size(rank_pool):
    # 0 + 5 + 1 + 5 = 11 over two ranks.
    assert run(rank_pool, who_am_i, add=5) == [(0, 2, 2, 11), (1, 2, 2, 11)]
    assert run(rank_pool, who_am_i, world_size=1, add=5) == [(0, 1, 1, 5)]
    assert run(rank_pool, who_am_i, add=5)[0] == (0, 2, 2, 11)


def test_all_ranks_leave_a_group_together(rank_pool):
    run(rank_pool, leave_only_together)
    assert run(rank_pool, who_am_i, world_size=1, add=5) == [(0, 1, 1, 5)]
    assert run(rank_pool, who_am_i, add=5)[0] == (0, 2, 2, 11)


def test_ranks_have_different_but_fixed_hash_seeds(rank_pool):
    # A loop over a set of names has another order on each rank, and the same one in every run.
    script = "print(hash('logprob'))"
    seeded = [
        int(
            subprocess.run(
                [sys.executable, "-c", script],
                env={"PYTHONHASHSEED": seed},
                capture_output=True,
                check=True,
            ).stdout
        )
        for seed in "12"
    ]
    assert run(rank_pool, hash_of, word="logprob") == seeded
    assert seeded[0] != seeded[1]


def test_a_rank_that_raises_is_named_with_its_traceback(rank_pool):
    with pytest.raises(
        RankFailureError,
        match=r"rank 1 raised in \S*test_rank_pool:raise_on:\n(.|\n)*a fault of this rank",
    ):
        run(rank_pool, raise_on, index=1)
    assert run(rank_pool, raise_on, index=7) == ["fine", "fine"]


def test_ranks_that_wait_for_a_failed_one_are_stopped(rank_pool):
    with pytest.raises(
        RankFailureError, match=r"rank 0 raised(.|\n)*rank 1 did not answer(.|\n)*barrier"
    ):
        run(rank_pool, raise_while_others_wait)
    assert run(rank_pool, raise_on, index=7) == ["fine", "fine"]


def test_a_rank_that_dies_is_named_with_its_exit_code(rank_pool):
    with pytest.raises(
        RankFailureError, match=r"rank 1 died in \S*test_rank_pool:die with exit code 3"
    ):
        run(rank_pool, die)


def variable(rank, *, name):
    return os.environ.get(name)


def test_new_ranks_have_the_environment_of_the_session(tmp_path, monkeypatch):
    # The process that they are forked from has started before.
    for value in ("first", "second"):
        monkeypatch.setenv("TEMPER_TEST_OF_RANKS", value)
        pool = RankPool(1, folder=tmp_path)
        assert run(pool, variable, world_size=1, name="TEMPER_TEST_OF_RANKS") == [value]
        pool.close()


def test_a_rank_that_hangs_is_named_with_its_stack(tmp_path):
    pool = RankPool(2, folder=tmp_path)
    run(pool, raise_on, index=7)
    pool.job_timeout_s = 1.0
    with pytest.raises(
        RankFailureError,
        match=r"rank 1 did not answer \S*test_rank_pool:sleep_long(.|\n)*sleep_long",
    ):
        run(pool, sleep_long)
    pool.close()


class _OnDevice(torch.Tensor):
    """A tensor that claims to be on a device; only its CPU copy may be sent."""

    @property
    def device(self):
        return torch.device("cuda")

    def cpu(self):
        return torch.tensor([1.0, 2.0])


def test_device_tensors_arrive_on_the_cpu():
    measured = torch.tensor([1.0, 2.0]).as_subclass(_OnDevice)
    arrived = pickle.loads(pickle_reply(JobReply(value={"gradient": measured})))
    assert type(arrived.value["gradient"]) is torch.Tensor
    assert arrived.value["gradient"].tolist() == [1.0, 2.0]


def test_pool_knows_the_data_parallel_ranks_of_every_layout(shared):
    """Failure messages name the data-parallel rank of a sequence."""
    setup, pool = shared.oracle.make_setup(QWEN2_GROUPED), shared.rank_pool
    for layout in (default_layout(2), *CONFORMANCE_LAYOUTS[:2]):
        pool.run(
            build, engine="staged_oracle:StagedOracle", layout=layout, arguments={"setup": setup}
        )
        assert pool.num_data_ranks == (1 if layout.fields else 2), layout.name


def test_closed_engines_are_freed_when_their_group_ends(shared):
    """Cycles that were frozen with modules are found, too: engines hold process groups."""
    setup, pool = shared.oracle.make_setup(QWEN2_GROUPED), shared.rank_pool

    def run_on_oracle(job, *, world_size, **arguments):
        return pool.run(
            job,
            engine="staged_oracle:StagedOracle",
            layout=default_layout(world_size),
            arguments=arguments,
        )

    run_on_oracle(cache_engine_in_a_cycle, world_size=1, setup=setup)
    assert run_on_oracle(has_cached_engine, world_size=1) == [True]
    # The other rank has cached none.
    assert run_on_oracle(has_cached_engine, world_size=2)[0] is False
