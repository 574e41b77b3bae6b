"""Check the completions that a server returns."""

import math

from temper_engine_api.errors import WeightError
from temper_trainer.rollout.vllm.messages import ServerSpec
from temper_trainer.types import Completion, FinishReason, SamplingRequest


def check_completion(
    request: SamplingRequest, completion: Completion, spec: ServerSpec, *, name: str, version: int
) -> None:
    """Check a completion that replica `name` returned; it must come from weights `version`.

    Raises:
        WeightError: If the completion has too few tokens, a log-prob that is not finite, no expert
            choices for all of its tokens, or was sampled with other weights.
    """
    message_start = f"{name} answered request {request.request_id} with"
    num_tokens, reason = len(completion.tokens), completion.finish_reason
    num_logprobs = len(completion.rollout_logprobs)
    if completion.request_id != request.request_id or num_logprobs != num_tokens:
        raise WeightError(
            f"{message_start} {num_tokens} tokens, {num_logprobs} log-probs and id "
            f"{completion.request_id}: report this as a bug."
        )
    # A sum of finite float32 numbers is finite, and one comparison is faster than one per token.
    if not math.isfinite(sum(completion.rollout_logprobs)):
        raise WeightError(
            f"{message_start} log-probs that are not finite, so its weights have overflowed or "
            "were damaged: check the gradient norms of the steps before."
        )
    is_short = num_tokens == 0 or (
        reason == FinishReason.MAX_TOKENS and num_tokens < request.sampling.max_tokens
    )
    if is_short and reason != FinishReason.INTERRUPTED:
        raise WeightError(
            f"{message_start} {num_tokens} tokens and finish reason {reason}, but "
            f"{request.sampling.max_tokens} tokens were requested: report this as a bug."
        )
    experts = completion.routed_experts
    if spec.has_expert_choices and reason != FinishReason.INTERRUPTED:
        num_processed = len(request.prompt_tokens) + num_tokens - 1
        if experts is None or len(experts) != num_processed:
            raise WeightError(
                f"{message_start} expert choices for {0 if experts is None else len(experts)} "
                f"tokens, but it processed {num_processed}: report this as a bug."
            )
    if completion.weight_version != version:
        raise WeightError(
            f"{name} sampled request {request.request_id} with weights "
            f"{completion.weight_version}, but weights {version} were published."
        )
