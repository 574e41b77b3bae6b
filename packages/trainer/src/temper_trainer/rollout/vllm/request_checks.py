"""What may be asked of a server, and what it promises of every completion."""

import math
from collections.abc import Sequence

from temper_engine_api.errors import ConfigError, WeightError
from temper_trainer.rollout.vllm.messages import ServerSpec
from temper_trainer.types import Completion, FinishReason, SamplingRequest


def check_requests(requests: Sequence[SamplingRequest], spec: ServerSpec) -> None:
    """Refuse what no server can answer.

    Raises:
        ConfigError: naming the request and the key to change.
    """
    if len({request.request_id for request in requests}) != len(requests):
        raise ConfigError("two sampling requests share a request_id: give each its own.")
    for request in requests:
        tokens, size = request.prompt_tokens, spec.vocab_size
        if not tokens or max(tokens) >= size or min(tokens) < 0:
            raise ConfigError(
                f"request {request.request_id}: a prompt needs at least one token, all from 0 to {size - 1}, but is {tokens!s:.80}: "
                "does the tokenizer belong to the model?"
            )
        if len(tokens) + request.sampling.max_tokens > spec.max_length:
            raise ConfigError(
                f"request {request.request_id}: a prompt of {len(tokens)} tokens and sampling.max_tokens "
                f"{request.sampling.max_tokens} are longer than rollout.vllm.max_model_len = {spec.max_length}: raise it, or "
                "lower data.max_prompt_tokens or sampling.max_tokens."
            )


def check_completion(
    request: SamplingRequest, completion: Completion, *, name: str, version: int
) -> None:
    """What a replica promises of every completion.

    Raises:
        WeightError: fewer tokens than promised, a log-prob that is no number, or other weights than were published.
    """
    what = f"{name} answered request {request.request_id} with"
    num_tokens, reason = len(completion.tokens), completion.finish_reason
    if (
        completion.request_id != request.request_id
        or len(completion.rollout_logprobs) != num_tokens
    ):
        raise WeightError(
            f"{what} {num_tokens} tokens, {len(completion.rollout_logprobs)} log-probs, id {completion.request_id}."
        )
    if not all(math.isfinite(value) for value in completion.rollout_logprobs):
        raise WeightError(
            f"{what} log-probs that are no numbers: its weights have overflowed or were damaged on their way."
        )
    is_short = num_tokens == 0 or (
        reason == FinishReason.MAX_TOKENS and num_tokens < request.sampling.max_tokens
    )
    if is_short and reason != FinishReason.INTERRUPTED:
        raise WeightError(
            f"{what} {num_tokens} tokens and the reason {reason}, but {request.sampling.max_tokens} were asked for."
        )
    if completion.weight_version != version:
        raise WeightError(
            f"{what} weights {completion.weight_version}, but {version} are published."
        )
