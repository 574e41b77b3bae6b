"""Environments of gymnasium in rollouts and in a run."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packages.trainer.tests.loops.byte_tokenizer_for_tests import make_tokenizer
from temper_engine_api.errors import ConfigError
from temper_trainer.config.environment import EnvironmentConfig
from temper_trainer.config.rollout import SamplingConfig
from temper_trainer.environment.protocol import Observation
from temper_trainer.environment.tool_environment import make_environment_factory
from temper_trainer.loops import RunResult
from temper_trainer.loops.rollouts.rollout_scheduler import RolloutScheduler
from temper_trainer.rollout.scripted_sampler import ScriptedSampler
from temper_trainer.types import Prompt, SamplingRequest

pytest.importorskip(
    "gymnasium", reason="needs temper-trainer[gymnasium]: nox -s adapters runs this"
)

import gymnasium

from temper_trainer.environment.gymnasium_environment import parse_action

CORRIDOR = "gymnasium_games_for_tests:temper-tests/Corridor-v0"
DIGITS = "gymnasium_games_for_tests:temper-tests/Digits-v0"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def make_config(**arguments: str | int) -> EnvironmentConfig:
    return EnvironmentConfig(
        name="gymnasium",
        arguments=arguments,
        call_end=";",
        answer_start="<",
        answer_end=">",
        max_turns=8,
    )


def test_policy_reads_the_observations_and_collects_the_rewards_of_an_episode() -> None:
    tokenizer = make_tokenizer()
    config = make_config(id=CORRIDOR, length=3)

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    requested: list[str] = []

    def script(request: SamplingRequest) -> list[int]:
        requested.append(tokenizer.decode(request.prompt_tokens))
        # An action that does not exist, and then steps to the right.
        return ids("7;" if len(requested) == 1 else " 1;")

    prompt = Prompt(prompt_id=5, text="go", tokens=tuple(ids("go")), answer="")
    request = SamplingRequest(
        request_id=0, prompt_tokens=prompt.tokens, sampling=SamplingConfig(max_tokens=8), seed=1
    )
    with RolloutScheduler(
        ScriptedSampler(script, end_token_id=0),
        environment=config,
        make_environment=make_environment_factory(config, tokenizer=tokenizer),
    ) as scheduler:
        (conversation,), metrics = scheduler.run(
            scheduler.run_rollouts([request], prompts=[prompt])
        )
    start = int(tokenizer.decode(conversation.opening).strip("<[]>"))
    assert requested[0] == f"go<[{start}]>"
    error = "<error: '7' is not an action of Discrete(2)>"
    assert requested[1] == f"go<[{start}]>7;{error}"
    assert conversation.rewards == [0.0] * (3 - start) + [1.0]
    assert conversation.full_tokens[: len(ids(requested[0]))] == ids(requested[0])
    assert metrics["environment/actions"] == 3 - start
    assert metrics["environment/wrong_actions"] == 1


def test_rollouts_of_a_prompt_start_in_the_same_state_and_others_in_their_own() -> None:
    make = make_environment_factory(
        make_config(id=CORRIDOR, length=1000), tokenizer=make_tokenizer()
    )

    async def open_corridor(prompt_id: int) -> tuple[int, ...]:
        environment = make()
        prompt = Prompt(prompt_id=prompt_id, text="", tokens=(1,), answer="")
        opening = environment.reset(prompt)
        assert asyncio.iscoroutine(opening)
        observation = await opening
        await environment.close()  # type: ignore[attr-defined]
        assert isinstance(observation, Observation)
        return observation.tokens

    starts = [asyncio.run(open_corridor(prompt_id)) for prompt_id in (3, 3, 4)]
    assert starts[0] == starts[1] != starts[2]


@pytest.mark.parametrize(
    ("space", "text"),
    [
        (gymnasium.spaces.Discrete(4), "9" * 30),
        (gymnasium.spaces.Discrete(4), "[" * 2000),
        (gymnasium.spaces.Box(0, 255, (2,), np.uint8), "[300, 1]"),
        (gymnasium.spaces.MultiDiscrete([3, 3]), "[1e400, 1]"),
    ],
)
def test_number_that_no_action_can_be_is_refused(space: Any, text: str) -> None:
    with pytest.raises(ValueError, match="is not an action of"):
        parse_action(text, space=space)


def test_unknown_id_is_refused_before_the_first_rollout() -> None:
    with pytest.raises(ConfigError, match=r"environment.arguments.id is nothing-v0"):
        make_environment_factory(make_config(id="nothing-v0"), tokenizer=make_tokenizer())


def test_policy_is_trained_in_a_gymnasium_environment(
    run: Callable[..., RunResult],
    rows: Callable[..., list[dict[str, float]]],
    tmp_path: Path,
) -> None:
    run(
        tmp_path / "run",
        f"environment={{name: gymnasium, arguments: {{id: '{DIGITS}'}}, call_end: '=', "
        "answer_start: '', answer_end: '', max_turns: 2, max_observation_tokens: 8}",
        "warm_start.total_steps=30",
        "run.total_steps=2",
        "run.save_model=false",
        "sampling.max_tokens=16",
    )
    step_rows = rows(tmp_path / "run")
    assert sum(row["environment/actions"] for row in step_rows) >= 32
    assert max(row["rollout/turns_max"] for row in step_rows) == 2
    assert all(row["batch/trained_tokens"] == row["rollout/tokens"] for row in step_rows)
