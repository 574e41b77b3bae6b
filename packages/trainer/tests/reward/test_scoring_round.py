"""Completions are scored one by one, while other rollouts are still sampled."""

import asyncio
import threading
from collections import Counter
from collections.abc import Sequence

import pytest

from temper_trainer.concurrency import PriorityLimit
from temper_trainer.config.reward import RewardConfig
from temper_trainer.reward.registry import register_reward
from temper_trainer.reward.scoring import Scorer
from temper_trainer.reward.scoring_round import RewardFailureError, ScoringRound
from temper_trainer.types import Prompt

WAIT_S = 30.0
calls: Counter[str] = Counter()
pair = threading.Barrier(2)


@register_reward("counts_calls")
def count_calls(prompt: Prompt, completion_text: str) -> float:
    """Fail as often as the completion says, then return 1."""
    calls[completion_text] += 1
    if calls[completion_text] <= int(completion_text.partition(" ")[0]):
        raise OSError("the service is restarting")
    return 1.0


@register_reward("meets_another_call")
def meet_another_call(prompt: Prompt, completion_text: str) -> float:
    """Return 1 once another call runs at the same time."""
    pair.wait(WAIT_S)
    return 1.0


def make_prompts(count: int) -> list[Prompt]:
    return [
        Prompt(prompt_id=i, text="?", tokens=(1,), answer="2", location=f"file:{i}")
        for i in range(count)
    ]


def test_completion_is_scored_while_others_are_open() -> None:
    async def score_the_last_one_first(scoring: ScoringRound) -> list[float | None]:
        last = await scoring.score(2, text="0 c", tokens=())
        others = [await scoring.score(i, text=text, tokens=()) for i, text in enumerate("00")]
        return [each.score.reward for each in (*others, last)]

    with Scorer(RewardConfig(function="counts_calls")) as scorer:
        scoring = scorer.open_round(make_prompts(3))
        assert asyncio.run(score_the_last_one_first(scoring)) == [1.0, 1.0, 1.0]


def test_failed_call_is_repeated_up_to_the_limit_and_counted() -> None:
    calls.clear()
    config = RewardConfig(function="counts_calls", max_retries=2, max_failure_fraction=1.0)
    with Scorer(config) as scorer:
        items = list(zip(make_prompts(3), ["2 a", "3 b", "0 c"], strict=True))
        assert [score.reward for score in scorer.score(items)] == [1.0, None, 1.0]
        assert scorer.metrics()["reward/retries"] == 4.0
        assert scorer.metrics()["reward/exception"] == 1.0
    assert calls == {"2 a": 3, "3 b": 3, "0 c": 1}


def test_calls_run_in_as_many_threads_as_configured() -> None:
    with Scorer(RewardConfig(function="meets_another_call", num_threads=2)) as scorer:
        items = [(prompt, "x") for prompt in make_prompts(4)]
        assert [score.reward for score in scorer.score(items)] == [1.0] * 4


def test_failures_of_one_round_do_not_stop_another() -> None:
    calls.clear()

    async def score_both(first: ScoringRound, second: ScoringRound) -> list[float | None]:
        scored = [await second.score(0, text="0 a", tokens=())]
        with pytest.raises(RewardFailureError, match="1 of 4 calls"):
            await first.score(0, text="9 b", tokens=())
        scored.append(await second.score(1, text="0 c", tokens=()))
        return [each.score.reward for each in scored]

    with Scorer(RewardConfig(function="counts_calls")) as scorer:
        rounds = [scorer.open_round(make_prompts(4), priority=i) for i in range(2)]
        assert asyncio.run(score_both(*rounds)) == [1.0, 1.0]


class CountingModel:
    """A reward model that returns the sum of the tokens and records its batches."""

    def __init__(self) -> None:
        self.batches: list[list[Sequence[int]]] = []

    def score_rows(self, rows: Sequence[Sequence[int]]) -> list[float]:
        self.batches.append(list(rows))
        return [float(sum(row)) for row in rows]


def test_reward_model_scores_a_round_in_one_pass_in_the_order_of_the_rollouts() -> None:
    model = CountingModel()

    async def score_all(scoring: ScoringRound) -> list[float | None]:
        tasks = [asyncio.create_task(scoring.score(i, text="", tokens=(i, 10))) for i in (3, 0, 2)]
        await asyncio.sleep(0.05)
        assert model.batches == []
        # The environment of rollout 1 has failed, so the others need not wait for it.
        scoring.leave(1)
        return [(await task).score.reward for task in tasks]

    with Scorer(RewardConfig(function="reward_model"), model=model) as scorer:
        rewards = asyncio.run(score_all(scorer.open_round(make_prompts(4))))
    assert rewards == [13.0, 10.0, 12.0]
    assert model.batches == [[(0, 10), (2, 10), (3, 10)]]


def test_limit_admits_waiting_bodies_when_it_grows_and_none_above_it_when_it_shrinks() -> None:
    async def run() -> list[int]:
        limit, is_over = PriorityLimit(1), asyncio.Event()
        num_running, seen = 0, []

        async def body(index: int) -> None:
            nonlocal num_running
            async with limit.acquire((0, index)):
                num_running += 1
                await is_over.wait()
                num_running -= 1

        tasks = [asyncio.create_task(body(i)) for i in range(6)]
        for capacity in (1, 4, 2):
            limit.resize(capacity)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            seen.append(num_running)
        is_over.set()
        await asyncio.gather(*tasks)
        return seen

    assert asyncio.run(run()) == [1, 4, 4]
