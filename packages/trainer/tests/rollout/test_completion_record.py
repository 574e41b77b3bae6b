"""The record of completions: small files, from which the same completions are replayed."""

from pathlib import Path

import pytest

from temper_engine_api.errors import ConfigError
from temper_trainer.config.rollout import SamplingConfig
from temper_trainer.rollout.completion_record import CompletionRecorder, CompletionReplay
from temper_trainer.types import Completion, FinishReason, SamplingRequest, pack_completion

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
    recorder.close()
    replay = CompletionReplay(path, needs_experts=False)
    assert [replay.find(make_request(seed)) for seed in (1, 0)] == completions[::-1]
    with pytest.raises(ConfigError, match="no completion for request 2 with seed 2"):
        replay.find(make_request(2))


def test_record_needs_11_bytes_per_token(tmp_path: Path) -> None:
    path = tmp_path / "completions.jsonl"
    recorder = CompletionRecorder(path)
    recorder.add(make_request(0), make_completion(0))
    recorder.close()
    # Four bytes for the token and four for its log-prob, in base64, and a few in total.
    assert path.stat().st_size < NUM_TOKENS * 8 * 4 / 3 + 300
