"""From the policy's token ids to a teacher's and back, where their tokenizers differ and the configuration says to map."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from temper_engine_api.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMap:
    """Ids of the same token text in two vocabularies."""

    forward: Mapping[int, int]
    """From the policy's id to the teacher's."""
    backward: Tensor
    """[teacher's vocabulary] int64 the policy's id, or -1 where it has none."""

    def to_teacher(self, tokens: Sequence[int]) -> tuple[int, ...] | None:
        """The teacher's ids; None where a token has none."""
        found = [self.forward.get(token) for token in tokens]
        return None if None in found else tuple(token for token in found if token is not None)

    def to_policy(self, top_ids: Tensor, top_logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """A teacher's likeliest tokens in the policy's ids; those that it lacks get id 0 and log-prob -inf."""
        ids = self.backward[top_ids]
        return ids.clamp(min=0), torch.where(ids >= 0, top_logprobs, -torch.inf)


def build_token_map(
    policy: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, *, name: str, may_map: bool
) -> TokenMap | None:
    """None where the vocabularies are the same; else the map between them, if that is allowed.

    Tokens are the same that are written the same; the end tokens are the same also where they are not.

    Raises:
        ConfigError: they differ and mapping was not asked for, or they share no token.
    """
    difference = describe_token_difference(policy, teacher)
    if not difference:
        return None
    if not may_map:
        raise ConfigError(
            f"teachers.{name} has another tokenizer than the policy: {difference}. Take a teacher with the policy's tokenizer, or set "
            "distillation.tokenizer_mismatch=map."
        )
    ours, theirs = policy.get_vocab(), teacher.get_vocab()
    shared = ours.keys() & theirs.keys()
    if not shared:
        raise ConfigError(
            f"teachers.{name} shares no token with the policy: nothing can be mapped. Take another teacher."
        )
    forward = {ours[token]: theirs[token] for token in shared}
    backward = torch.full((max(theirs.values()) + 1,), -1, dtype=torch.int64)
    for policy_id, teacher_id in forward.items():
        backward[teacher_id] = policy_id
    our_end, their_end = policy.eos_token_id, teacher.eos_token_id
    if our_end is not None and their_end is not None:
        # Every whole completion ends in it, and two families hardly ever write it alike.
        forward.setdefault(our_end, their_end)
        if backward[their_end] < 0:
            backward[their_end] = our_end
    return TokenMap(forward=forward, backward=backward)


def describe_token_difference(
    policy: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase
) -> str:
    """Empty where every id means the same token in both; else how they differ."""
    ours, theirs = policy.get_vocab(), other.get_vocab()
    if ours == theirs:
        return ""
    shared = ours.keys() & theirs.keys()
    moved = [token for token in sorted(shared) if ours[token] != theirs[token]]
    example = (
        f"; {moved[0]!r} is {ours[moved[0]]} in one and {theirs[moved[0]]} in the other"
        if moved
        else ""
    )
    return f"{len(ours)} and {len(theirs)} tokens, {len(shared)} of them in both{example}"
