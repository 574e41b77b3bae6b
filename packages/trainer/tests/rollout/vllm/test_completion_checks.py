"""Checks of completions that servers return."""

from dataclasses import replace

import pytest
import torch

from packages.trainer.tests.rollout.models_for_tests import make_requests
from temper_engine_api.errors import WeightError
from temper_trainer.config.rollout import SamplingConfig
from temper_trainer.rollout.vllm.completion_checks import check_completion
from temper_trainer.rollout.vllm.messages import ServerSpec
from temper_trainer.types import Completion, FinishReason

SPEC = ServerSpec(
    arguments={}, end_token_ids=(1,), max_length=16, vocab_size=9, has_expert_choices=True
)
(REQUEST,) = make_requests([[2, 3, 4]], SamplingConfig(max_tokens=2))
COMPLETION = Completion(
    request_id=0,
    tokens=(5, 6),
    rollout_logprobs=(-0.5, -0.5),
    finish_reason=FinishReason.MAX_TOKENS,
    weight_version=1,
    # Prompt and completion have five tokens; the last one is never processed.
    routed_experts=torch.zeros(4, 2, 2, dtype=torch.int16),
)


@pytest.mark.parametrize("experts", [None, torch.zeros(5, 2, 2, dtype=torch.int16)])
def test_completion_without_the_experts_of_each_token_is_refused(
    experts: torch.Tensor | None,
) -> None:
    check_completion(REQUEST, COMPLETION, SPEC, name="replica 0", version=1)
    wrong = replace(COMPLETION, routed_experts=experts)
    with pytest.raises(WeightError, match=r"tokens, but it processed 4: report this as a bug"):
        check_completion(REQUEST, wrong, SPEC, name="replica 0", version=1)
    without = replace(SPEC, has_expert_choices=False)
    check_completion(REQUEST, replace(wrong, routed_experts=None), without, name="x", version=1)


def test_interrupted_completion_needs_no_experts() -> None:
    interrupted = replace(COMPLETION, finish_reason=FinishReason.INTERRUPTED, routed_experts=None)
    check_completion(REQUEST, interrupted, SPEC, name="replica 0", version=1)
