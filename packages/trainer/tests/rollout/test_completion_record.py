"""The record of completions: small files, from which the same completions are replayed."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from temper_engine_api.errors import ConfigError
from temper_trainer.config.rollout import SamplingConfig
from temper_trainer.rollout.completion_record import CompletionRecorder, CompletionReplay
from temper_trainer.types import (
    Completion,
    FinishReason,
    RefusedRequestError,
    SamplingRequest,
    pack_completion,
)

NUM_TOKENS = 4096


def make_request(seed: int) -> SamplingRequest:
    return SamplingRequest(
        request_id=seed, prompt_tokens=(1, 2), sampling=SamplingConfig(max_tokens=1), seed=seed
    )


def make_completion(seed: int, *, token_versions: tuple[int, ...] = ()) -> Completion:
    completion = Completion(
        request_id=seed,
        tokens=tuple(range(100_000 + seed, 100_000 + seed + NUM_TOKENS)),
        rollout_logprobs=tuple(-1.0 / (seed + i) for i in range(1, NUM_TOKENS + 1)),
        finish_reason=FinishReason.END_TOKEN,
        weight_version=3,
        token_versions=token_versions,
    )
    return pack_completion(completion)


def test_completions_with_their_versions_are_replayed_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "completions.jsonl"
    versions = (3,) * (NUM_TOKENS - 1) + (4,)
    completions = [make_completion(0), make_completion(1, token_versions=versions)]
    recorder = CompletionRecorder(path)
    for seed, completion in enumerate(completions):
        recorder.add(make_request(seed), completion)
    recorder.add_refusal(make_request(2), RefusedRequestError("request 2 is too long.", 2))
    recorder.close()
    replay = CompletionReplay(path, needs_experts=False)
    assert [replay.find(make_request(seed)) for seed in (1, 0)] == completions[::-1]
    with pytest.raises(RefusedRequestError, match=r"^request 2 is too long\.$"):
        replay.find(make_request(2))
    with pytest.raises(ConfigError, match="no completion for request 3 with seed 3"):
        replay.find(make_request(3))


def test_each_line_is_in_the_file_at_once_and_a_partial_one_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "completions.jsonl"
    recorder = CompletionRecorder(path)
    recorder.add(make_request(0), make_completion(0))
    recorder.add_batch(1, groups=[0])
    written = path.read_bytes()  # as much as is left after SIGKILL
    assert CompletionReplay(path, needs_experts=False).find_batch(1) == [0]
    path.write_bytes(written + written[:1000])  # a line that the run did not finish
    resumed = CompletionRecorder(path)
    resumed.add_batch(2, groups=[1])
    replay = CompletionReplay(path, needs_experts=False)
    assert replay.find(make_request(0)) == make_completion(0)
    assert replay.find_batch(2) == [1]
    with pytest.raises(ConfigError, match="does not say which groups step 3 trained"):
        replay.find_batch(3)
    recorder.close()
    resumed.close()


OLD_LINE = '{"key": "00", "tokens": [4, 2], "logprobs": [-0.5, -0.25], "weight_version": 0}\n'


def test_record_of_an_older_version_is_neither_replayed_nor_continued(tmp_path: Path) -> None:
    path = tmp_path / "completions.jsonl"
    path.write_text(OLD_LINE)
    with pytest.raises(ConfigError, match="was recorded by an older version of Temper: record it"):
        CompletionReplay(path, needs_experts=False)
    with pytest.raises(ConfigError, match="was recorded by an older version of Temper: record it"):
        CompletionRecorder(path)
    assert path.read_text() == OLD_LINE


@pytest.mark.parametrize(
    ("old", "new", "cause"),
    [
        ('"tokens":"', '"token":"', "a completion has no tokens"),
        ('"key":', '"keys":', "a completion has no key"),
        ('"tokens":"', '"tokens":"?', "base64|padding"),
        ('"tokens":"', '"tokens":"AAAA', "bytes length not a multiple"),
        ('"finish_reason":"', '"finish_reason":"un', "not a valid FinishReason"),
    ],
)
def test_damaged_completion_is_named_with_the_file(
    tmp_path: Path, old: str, new: str, cause: str
) -> None:
    path = tmp_path / "completions.jsonl"
    recorder = CompletionRecorder(path)
    recorder.add(make_request(0), make_completion(0))
    recorder.close()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ConfigError, match=rf"completions\.jsonl, which cannot be read .*({cause})"):
        CompletionReplay(path, needs_experts=False).find(make_request(0))


def test_pipe_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "completions.jsonl"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="it is no regular file"):
        CompletionReplay(path, needs_experts=False)


def test_only_the_last_completion_of_a_request_needs_experts(tmp_path: Path) -> None:
    path = tmp_path / "completions.jsonl"
    experts = torch.zeros(NUM_TOKENS, 1, 1, dtype=torch.int16)
    recorder = CompletionRecorder(path)
    recorder.add(make_request(0), make_completion(0))
    recorder.add(make_request(0), replace(make_completion(0), routed_experts=experts))
    recorder.close()
    completion = CompletionReplay(path, needs_experts=True).find(make_request(0))
    assert completion.routed_experts is not None


def test_record_needs_11_bytes_per_token(tmp_path: Path) -> None:
    path = tmp_path / "completions.jsonl"
    recorder = CompletionRecorder(path)
    recorder.add(make_request(0), make_completion(0))
    recorder.close()
    # Four bytes for the token and four for its log-prob, in base64, and a few in total.
    assert path.stat().st_size < NUM_TOKENS * 8 * 4 / 3 + 300
