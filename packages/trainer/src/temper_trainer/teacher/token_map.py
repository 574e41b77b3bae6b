"""Map token ids between the policy's and a teacher's tokenizer (`tokenizer_mismatch=map`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from temper_engine_api.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMap:
    """Ids of the same token text in two vocabularies."""

    policy_to_teacher: Mapping[int, int]
    teacher_to_policy: Tensor
    """[teacher's vocabulary] int64 policy id, or -1 if the policy does not have the token."""

    def to_teacher(self, tokens: Sequence[int]) -> tuple[int, ...] | None:
        """Return the teacher's ids; None if the teacher lacks a token."""
        ids = [self.policy_to_teacher.get(token) for token in tokens]
        return None if None in ids else tuple(token for token in ids if token is not None)

    def to_policy(self, top_ids: Tensor, top_logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """Return a teacher's most likely tokens in policy ids, with their log-probs.

        Tokens that the policy does not have get id 0 and log-prob -inf.
        """
        ids = self.teacher_to_policy[top_ids]
        # Id 0 is only a valid index: a log-prob of -inf excludes the token from the loss.
        return ids.clamp(min=0), torch.where(ids >= 0, top_logprobs, -torch.inf)


def build_token_map(
    policy: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, *, name: str, may_map: bool
) -> TokenMap | None:
    """Return a map between two vocabularies; None if they are equal.

    Tokens with the same text are mapped to each other. So are the end tokens of the two
    vocabularies, even if their texts differ.

    Raises:
        ConfigError: If they differ and mapping is not allowed, or they have no token in common.
    """
    difference = describe_token_difference(policy, teacher)
    if not difference:
        return None
    if not may_map:
        raise ConfigError(
            f"teachers.{name} has another tokenizer than the policy: {difference}. Use a teacher "
            "with the policy's tokenizer, or set distillation.tokenizer_mismatch=map."
        )
    policy_ids, teacher_ids = policy.get_vocab(), teacher.get_vocab()
    common = policy_ids.keys() & teacher_ids.keys()
    if not common:
        raise ConfigError(
            f"teachers.{name} has no token in common with the policy, so nothing can be mapped: "
            "use another teacher."
        )
    # Match by text, because equal ids of different vocabularies are different tokens.
    policy_to_teacher = {policy_ids[token]: teacher_ids[token] for token in common}
    teacher_to_policy = torch.full((max(teacher_ids.values()) + 1,), -1, dtype=torch.int64)
    for policy_id, teacher_id in policy_to_teacher.items():
        teacher_to_policy[teacher_id] = policy_id
    policy_end, teacher_end = policy.eos_token_id, teacher.eos_token_id
    if policy_end is not None and teacher_end is not None:
        # Without this, hardly any completion could be mapped: all that are complete end with the
        # end token, and model families use different texts for it.
        policy_to_teacher.setdefault(policy_end, teacher_end)
        if teacher_to_policy[teacher_end] < 0:
            teacher_to_policy[teacher_end] = policy_end
    return TokenMap(policy_to_teacher=policy_to_teacher, teacher_to_policy=teacher_to_policy)


def describe_token_difference(
    policy: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase
) -> str:
    """Describe how two vocabularies differ; empty if every id is the same token in both."""
    policy_ids, other_ids = policy.get_vocab(), other.get_vocab()
    if policy_ids == other_ids:
        return ""
    common = policy_ids.keys() & other_ids.keys()
    moved = [token for token in sorted(common) if policy_ids[token] != other_ids[token]]
    example = (
        f"; {moved[0]!r} is {policy_ids[moved[0]]} in one and {other_ids[moved[0]]} in the other"
        if moved
        else ""
    )
    return f"{len(policy_ids)} and {len(other_ids)} tokens, {len(common)} of them in both{example}"
