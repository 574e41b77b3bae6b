"""Test the recorded rollouts and their part of the report."""

import io
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from temper_trainer.metrics.report import write_report
from temper_trainer.metrics.rollout_records import (
    MAX_TOKENS,
    NUM_ROLLOUTS,
    pick_rollouts,
    split_text,
    to_rollout_row,
)
from temper_trainer.metrics.run_log import RunLog
from temper_trainer.types import Branch, Completion, FinishReason, Prompt, Rollout, Turn


def decode(tokens: Sequence[int]) -> str:
    """Decode bytes."""
    return bytes(tokens).decode(errors="replace")


def make_completion(
    text: str, *, version: int = 3, token_versions: tuple[int, ...] = ()
) -> Completion:
    tokens = tuple(text.encode())
    return Completion(
        request_id=0,
        tokens=tokens,
        rollout_logprobs=tuple(-0.5 * i for i in range(len(tokens))),
        finish_reason=FinishReason.END_TOKEN,
        weight_version=version,
        token_versions=token_versions,
    )


def make_rollout(
    text: str = "=", *, reward: float = 1.0, group: int = 0, sample: int = 0
) -> Rollout:
    return Rollout(
        prompt=Prompt(prompt_id=7, text="1+1", tokens=tuple(b"1+1"), answer="2"),
        completion=make_completion(text),
        text=text,
        reward=reward,
        group_id=group,
        sample_id=sample,
    )


def list_segments(rollout: Rollout) -> list[list[dict[str, Any]]]:
    row = json.loads(json.dumps(to_rollout_row(rollout, step=2, decode=decode)))
    histories: list[list[dict[str, Any]]] = row["histories"]
    return histories


def test_row_has_tokens_logprobs_versions_and_rewards_of_each_turn() -> None:
    second = make_completion("2!", version=3, token_versions=(3, 4))
    rollout = replace(
        make_rollout(),
        turns=(Turn(observation=tuple(b"?"), completion=second),),
        turn_rewards=(0.25, -1.0),
    )
    prompt, first, answer, last = list_segments(rollout)[0]
    assert [each["role"] for each in (prompt, first, answer, last)] == [
        "prompt",
        "completion",
        "environment",
        "completion",
    ]
    assert prompt["texts"] == ["1", "+", "1"]
    assert (answer["ids"], "logprobs" in answer) == ([63], False)
    assert (first["versions"], first["reward"]) == ([3], 0.25)
    assert (last["logprobs"], last["versions"], last["reward"]) == ([0.0, -0.5], [3, 4], -1.0)


def test_branches_of_an_agent_are_further_histories() -> None:
    branch = Branch(prompt_tokens=tuple(b"new"), completion=make_completion("ok"))
    histories = list_segments(replace(make_rollout(), branches=(branch,)))
    assert [segment["texts"] for segment in histories[1]] == [["n", "e", "w"], ["o", "k"]]


def test_long_rollouts_are_cut() -> None:
    (segments,) = list_segments(make_rollout("x" * 10_000))
    assert [len(each["ids"]) for each in segments] == [3, MAX_TOKENS - 3]
    assert len(segments[1]["logprobs"]) == MAX_TOKENS - 3


def test_tokens_of_a_secret_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "sk-0123456789abcdef")
    prompt, completion = list_segments(make_rollout("it is sk-0123456789abcdef!"))[0]
    assert prompt["texts"] == ["1", "+", "1"]
    assert completion["ids"] == []
    assert "0123456789" not in json.dumps(completion["texts"])


def test_secret_is_left_out_also_if_only_its_beginning_would_be_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "sk-0123456789abcdef")
    text = "x" * (MAX_TOKENS - 15) + "sk-0123456789abcdef"  # after 3 tokens of the prompt
    completion = list_segments(make_rollout(text))[0][1]
    assert "".join(completion["texts"]) == "<hidden: these tokens have a secret>"


def test_infinite_logprobs_and_rewards_are_null() -> None:
    completion = replace(make_completion("a"), rollout_logprobs=(-float("inf"),))
    rollout = replace(make_rollout(reward=float("nan")), completion=completion)
    row = to_rollout_row(rollout, step=1, decode=decode)
    assert row["reward"] is None
    assert list_segments(rollout)[0][1]["logprobs"] == [None]


def test_character_of_several_tokens_is_in_its_first_token() -> None:
    text = "né 語🙂"
    texts = split_text(tuple(text.encode()), decode=decode)
    assert texts == ["n", "é", "", " ", "語", "", "", "🙂", "", "", ""]
    assert split_text((0xFF, 65), decode=decode) == ["\N{REPLACEMENT CHARACTER}", "A"]


def test_first_rollouts_of_prompts_and_the_extremes_are_picked() -> None:
    rewards = [0.5, 0.25, 0.5, 0.0, 0.5, 1.0]
    rollouts = [
        make_rollout(reward=reward, group=i // 2, sample=i) for i, reward in enumerate(rewards)
    ]
    assert [each.sample_id for each in pick_rollouts(rollouts, count=2)] == [0, 2, 3, 5]


def test_report_embeds_rollouts_without_markup(tmp_path: Path) -> None:
    with RunLog(
        tmp_path, trackers=("jsonl",), progress=False, console=Console(file=io.StringIO())
    ) as log:
        log.log_metrics(1, {"reward/mean": 0.5}, phase="rl")
        log.add_rollouts(1, [make_rollout("</script><b>")], decode=decode)
    path = write_report(tmp_path)
    assert path is not None
    page = path.read_text(encoding="utf-8")
    (data,) = re.findall(r'id="rollout-data">(.*?)</script>', page)
    texts = json.loads(data)[0]["histories"][0][1]["texts"]
    assert "".join(texts) == "</script><b>"
    assert "<b>" not in page


def test_file_of_rollouts_keeps_the_newest(tmp_path: Path) -> None:
    with RunLog(tmp_path, trackers=(), progress=False, console=Console(file=io.StringIO())) as log:
        for step in range(1, 101):
            log.add_rollouts(step, [make_rollout(sample=i) for i in range(5)], decode=decode)
    lines = (tmp_path / "rollouts.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert NUM_ROLLOUTS <= len(steps) <= 2 * NUM_ROLLOUTS
    assert steps[-1] == 100
