"""Write single rollouts with their tokens to `rollouts.jsonl`, for the viewer in the report.

The file keeps the newest rollouts only, with a bounded number of tokens each.
"""

import json
import math
from collections.abc import Callable, Sequence

from temper_trainer.redaction import redact_secrets
from temper_trainer.types import Branch, Completion, Rollout

ROLLOUTS_FILE = "rollouts.jsonl"
NUM_ROLLOUTS = 48
"""Minimum number of rollouts in the file; it has at most twice as many."""
MAX_TOKENS = 4096
"""Maximum number of tokens per rollout in the file; its end is left out."""

Decode = Callable[[Sequence[int]], str]
"""Returns the text of tokens, with special tokens."""
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Text that a tokenizer returns for a part of a character."""


def pick_rollouts(rollouts: Sequence[Rollout], *, count: int) -> list[Rollout]:
    """Return the first rollout for each of the first prompts, and the worst and the best one.

    Args:
        rollouts: Rollouts of a step.
        count: Number of prompts.
    """
    firsts: dict[int, Rollout] = {}
    for rollout in rollouts:
        firsts.setdefault(rollout.group_id, rollout)
    by_reward = sorted(rollouts, key=lambda each: each.reward)
    picked = [*list(firsts.values())[:count], by_reward[0], by_reward[-1]]
    return list({each.sample_id: each for each in picked}.values())


def to_rollout_row(rollout: Rollout, *, step: int, decode: Decode) -> dict[str, object]:
    """Return a rollout as a line for the file.

    ``histories`` has a list of segments for the main history, and one for each agent branch. A
    segment has token ids and texts. The segment of a completion also has the log-prob of each
    token, the weight version (one per token if they differ), and the environment's reward.

    Tokens are left out if their text contains a secret.

    Args:
        rollout: A trained rollout.
        step: Number of its step.
        decode: Decodes tokens.
    """
    main = Branch(
        prompt_tokens=rollout.prompt.tokens, completion=rollout.completion, turns=rollout.turns
    )
    num_remaining = MAX_TOKENS
    histories = []
    for i, branch in enumerate((main, *rollout.branches)):
        segments, num_remaining = _to_segments(
            branch,
            rewards=() if i else rollout.turn_rewards,
            decode=decode,
            max_tokens=num_remaining,
        )
        histories.append(segments)
    return {
        "step": step,
        "prompt": rollout.prompt.prompt_id,
        "group": rollout.group_id,
        "sample": rollout.sample_id,
        "reward": _round(rollout.reward),
        "components": [_round(each) for each in rollout.components],
        "answer": redact_secrets(rollout.prompt.answer),
        "num_tokens": len(rollout.prompt.tokens) + rollout.num_tokens,
        "histories": histories,
    }


def to_json_line(row: dict[str, object]) -> str:
    """Return a line for the file."""
    return json.dumps(row, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _to_segments(
    branch: Branch, *, rewards: Sequence[float], decode: Decode, max_tokens: int
) -> tuple[list[dict[str, object]], int]:
    """Return the segments of a history, and how many tokens are left for others."""
    segments: list[dict[str, object]] = []

    def add(role: str, tokens: Sequence[int], **fields: object) -> None:
        nonlocal max_tokens
        shown = _to_tokens(tokens, decode=decode, max_tokens=max_tokens)
        max_tokens -= min(len(tokens), max_tokens)
        segments.append({"role": role, **shown, **fields})

    add("prompt", branch.prompt_tokens)
    completions = branch.completions
    observations = [turn.observation for turn in branch.turns]
    for i, completion in enumerate(completions):
        if i and observations[i - 1]:
            add("environment", observations[i - 1])
        add(
            "completion",
            completion.tokens,
            **_describe_completion(completion, max_tokens=max_tokens),
            reward=_round(rewards[i]) if i < len(rewards) else None,
        )
    return segments, max_tokens


def _describe_completion(completion: Completion, *, max_tokens: int) -> dict[str, object]:
    return {
        "logprobs": [_round(each) for each in completion.rollout_logprobs[:max_tokens]],
        "versions": list(completion.token_versions[:max_tokens]) or [completion.weight_version],
        "finish": completion.finish_reason.value,
    }


def _round(value: float) -> float | None:
    """Return a number that JSON can have; None if it is not finite."""
    return round(value, 5) if math.isfinite(value) else None


def _to_tokens(tokens: Sequence[int], *, decode: Decode, max_tokens: int) -> dict[str, object]:
    # All of them, because the beginning of a secret that is cut would not be recognized.
    text = decode(tokens)
    if redact_secrets(text) != text:
        return {"ids": [], "texts": ["<hidden: these tokens have a secret>"]}
    shown = tokens[:max_tokens]
    return {"ids": list(shown), "texts": split_text(shown, decode=decode)}


def split_text(tokens: Sequence[int], *, decode: Decode) -> list[str]:
    """Return each token's text.

    When a character has several tokens, it is in the first token's text; the others are empty.

    Example:
        >>> split_text([104, 195, 169], decode=lambda ids: bytes(ids).decode(errors="replace"))
        ['h', 'é', '']
    """
    texts = [decode([token]) for token in tokens]
    start = 0
    while start < len(tokens):
        end = start + 1
        if _INCOMPLETE in texts[start]:
            # A character has at most four bytes, and a token at least one.
            for last in range(start + 2, min(start + 4, len(tokens)) + 1):
                if _INCOMPLETE not in (joined := decode(tokens[start:last])):
                    texts[start:last] = [joined, *[""] * (last - start - 1)]
                    end = last
                    break
        start = end
    return texts
