"""Credits of loop async, tested with random orders of all possible events."""

import random

from hypothesis import given
from hypothesis import strategies as st

from temper_trainer.loops.rollouts.batch_pipeline import Credits

NUM_BATCHES = 40


def play(max_staleness: int, *, samplers: int, seed: int, slow: int | None = None) -> list[int]:
    """Return the staleness of each batch when it was trained.

    Batch ``slow`` finishes only when no other event is possible.
    """
    choose = random.Random(seed)
    account = Credits(max_staleness=max_staleness)
    begun_at: dict[int, int] = {}
    open_batches: set[int] = set()
    finished: set[int] = set()
    staleness: list[int] = []
    while account.num_trained < NUM_BATCHES:
        events: list[tuple[str, int]] = []
        if account.can_start and len(open_batches) < samplers and account.num_started < NUM_BATCHES:
            events.append(("begin", account.num_started))
        events += [("finish", batch) for batch in sorted(open_batches) if batch != slow]
        if account.num_trained in finished:
            events.append(("train", account.num_trained))
        if not events:
            assert slow in open_batches, f"deadlock: nothing can happen in {account}"
            events = [("finish", slow)]
        kind, batch = choose.choice(events)
        if kind == "begin":
            begun_at[batch] = account.num_trained
            open_batches.add(batch)
            account = account.start()
        elif kind == "finish":
            open_batches.remove(batch)
            finished.add(batch)
        else:
            staleness.append(account.num_trained - begun_at[batch])
            account = account.train()
        assert account.num_started - account.num_trained <= max_staleness + 1
    return staleness


@given(max_staleness=st.integers(0, 5), samplers=st.integers(1, 4), seed=st.integers(0, 10_000))
def test_any_order_of_events_trains_every_batch_once_within_the_staleness_limit(
    max_staleness: int, samplers: int, seed: int
) -> None:
    staleness = play(max_staleness, samplers=samplers, seed=seed)
    assert len(staleness) == NUM_BATCHES
    assert min(staleness) >= 0
    assert max(staleness) <= max_staleness


@given(slow=st.integers(0, NUM_BATCHES - 1), seed=st.integers(0, 1000))
def test_slowest_batch_is_neither_starved_nor_overtaken(slow: int, seed: int) -> None:
    assert max(play(2, samplers=3, seed=seed, slow=slow)) <= 2


def test_batch_without_staleness_waits_for_the_previous_update() -> None:
    account = Credits(max_staleness=0).start()
    assert not account.can_start
    assert account.train().can_start
