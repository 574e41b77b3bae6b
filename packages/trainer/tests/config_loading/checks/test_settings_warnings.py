"""Settings with which a run learns nothing or little are warned about."""

import json
from pathlib import Path

import pytest

from temper_trainer.config_loading import load
from temper_trainer.config_loading.checks.settings_warnings import (
    warn_about_aggregation,
    warn_about_settings,
)


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    rows = [{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *("experiment=quickstart", "warm_start=null", "~data.eval", "~data.train"),
        *("+data.train.name=jsonl", f"+data.train.paths=[{tmp_path}/rows.jsonl]"),
        "batching.prompts_per_step=16",
    ]


def test_learning_rate_of_zero_is_a_warning(
    settings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    warn_about_settings(load(settings).config)
    assert not caplog.messages
    warn_about_settings(load([*settings, "actor.engine.optimizer.lr=0"]).config)
    (message,) = caplog.messages
    assert message.startswith("actor.engine.optimizer.lr is 0, so its weights will not change")


def test_agent_with_advantages_per_token_is_a_warning(
    settings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    agent = (
        "data.chat_template=x",
        "environment={name: agent, arguments: {command: a}, max_tokens: 99}",
    )
    warn_about_settings(load([*settings, *agent]).config)
    assert not caplog.messages
    per_token = [*settings, *agent, "algorithm=reinforce_plus_plus"]
    warn_about_settings(load([*per_token, "environment.max_turns=1"]).config)
    assert not caplog.messages
    warn_about_settings(load(per_token).config)
    (message,) = caplog.messages
    assert message.startswith("environment is agent, whose rollouts are several samples if")


@pytest.mark.parametrize(
    ("overrides", "is_warned"),
    [
        (["algorithm=gspo"], False),
        (["algorithm=gspo", "algorithm.aggregation=token_mean"], True),
        (["algorithm=grpo", "algorithm.policy_loss=sapo"], True),
        (["algorithm=grpo"], False),
    ],
)
def test_another_aggregation_than_the_papers_is_warned_about(
    settings: list[str], caplog: pytest.LogCaptureFixture, overrides: list[str], is_warned: bool
) -> None:
    warn_about_aggregation(load([*settings, *overrides]).config.algorithm)
    assert ("was published with algorithm.aggregation" in caplog.text) is is_warned
