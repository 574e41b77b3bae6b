"""Find stop texts in sampled tokens."""

from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from temper_trainer.types import Completion, FinishReason


def ends_in_stop_text(
    tokens: Sequence[int], *, stop: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> bool:
    """Return True if the last tokens contain a stop text; call it after each token.

    Decoding the tail is enough: a character has at most four tokens (its bytes), and earlier calls
    have checked earlier tokens.
    """
    tail = tokenizer.decode(list(tokens[-_tail_length(stop) :]), skip_special_tokens=True)
    return any(text in tail for text in stop)


def cut_continuation(
    completion: Completion,
    *,
    before: Sequence[int],
    stop: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
) -> Completion:
    """End a continuation at a stop text that begins before it, in the interrupted part.

    The sampler searches only the continuation, so it misses such a stop text. Tokens after the stop
    text are dropped, as in a completion that was not interrupted.
    """
    tokens = [*before, *completion.tokens]
    # A stop text that begins in the continuation was found by the sampler.
    last = min(len(tokens), len(before) + _tail_length(stop))
    for end in range(len(before) + 1, last + 1):
        if ends_in_stop_text(tokens[:end], stop=stop, tokenizer=tokenizer):
            num_dropped = len(tokens) - end
            num_kept = len(completion.tokens) - num_dropped
            experts = completion.routed_experts
            return replace(
                completion,
                tokens=completion.tokens[:num_kept],
                rollout_logprobs=completion.rollout_logprobs[:num_kept],
                finish_reason=FinishReason.STOP_TEXT,
                # One row per token of prompt and completion, except for the last token.
                routed_experts=None if experts is None else experts[: len(experts) - num_dropped],
            )
    return completion


def _tail_length(stop: Sequence[str]) -> int:
    return 4 * max(map(len, stop)) + 4
