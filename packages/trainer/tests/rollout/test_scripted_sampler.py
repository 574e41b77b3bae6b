"""The fake sampler behaves as a real one wherever the trainer can see a difference."""

import pytest
import torch

from packages.trainer.tests.rollout.models_for_tests import make_requests
from temper_engine_api.weights import NamedWeight
from temper_trainer.config.rollout import SamplingConfig
from temper_trainer.rollout.sampler import Sampler
from temper_trainer.rollout.scripted_sampler import ScriptedSampler
from temper_trainer.types import FinishReason, RefusedRequestError


def test_script_is_truncated_at_max_tokens_and_has_the_version() -> None:
    sampler = ScriptedSampler(lambda request: [*request.prompt_tokens, 1], end_token_id=1)
    assert isinstance(sampler, Sampler)
    sampler.load_weights([NamedWeight("w", torch.ones(2))], version=4)
    short, cut = sampler.sample(make_requests([[8], [7, 8, 9]], SamplingConfig(max_tokens=2)))
    assert (short.tokens, short.finish_reason, short.weight_version) == (
        (8, 1),
        FinishReason.END_TOKEN,
        4,
    )
    assert (cut.tokens, cut.finish_reason, cut.rollout_logprobs) == (
        (7, 8),
        FinishReason.MAX_TOKENS,
        (-1.0, -1.0),
    )
    assert sampler.compute_logprobs([[1, 2, 3]], temperature=1.0) == [[-1.0, -1.0]]
    assert list(sampler.weights) == ["w"]


def test_script_without_tokens_is_refused() -> None:
    with pytest.raises(RefusedRequestError, match=r"^request 0 has a script without tokens"):
        ScriptedSampler(lambda request: [], end_token_id=1).sample(
            make_requests([[8]], SamplingConfig())
        )
