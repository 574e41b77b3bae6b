"""One token per row from logits. The draw of a request at a position is a pure function of (its seed, the position) and its logits.

Shapes: n rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from temper_engine_api.errors import WeightError
from temper_trainer.config.rollout import SamplingConfig

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 1024
"""Vocabulary entries whose probabilities are summed first: a running sum over all of V in float32 would lose small ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSamplingOptions:
    """How each row is drawn."""

    temperature: Tensor
    """[n] float32; 1 where the row is greedy, so that its log-prob is the untempered one."""
    is_greedy: Tensor
    """[n] bool."""
    top_p: Tensor
    """[n] float32."""
    top_k: Tensor
    """[n] int64; V or more keeps all."""
    seeds: np.ndarray
    """[n] uint64."""
    any_greedy: bool
    """Whether a row is greedy."""
    all_greedy: bool
    """Whether every row is."""
    any_truncated: bool
    """Whether a row has top_p below 1 or a top_k."""

    @classmethod
    def of(
        cls, samplings: Sequence[SamplingConfig], *, seeds: Sequence[int], device: torch.device
    ) -> "TokenSamplingOptions":
        """The options of n requests; a seed of any size counts modulo 2^64."""
        greedy = [sampling.temperature == 0 for sampling in samplings]
        everything = torch.iinfo(torch.int64).max
        return cls(
            temperature=torch.tensor(
                [sampling.temperature or 1.0 for sampling in samplings], device=device
            ),
            is_greedy=torch.tensor(greedy, device=device),
            top_p=torch.tensor([sampling.top_p for sampling in samplings], device=device),
            top_k=torch.tensor(
                [sampling.top_k or everything for sampling in samplings], device=device
            ),
            seeds=np.array([seed % 2**64 for seed in seeds], dtype=np.uint64),
            any_greedy=any(greedy),
            all_greedy=all(greedy),
            any_truncated=any(sampling.top_p < 1 or sampling.top_k > 0 for sampling in samplings),
        )


def sample_tokens(
    logits: Tensor, *, options: TokenSamplingOptions, positions: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Tokens and their log-probs after temperature and before top-p and top-k.

    Args:
        logits: [n, V] float32; overwritten.
        options: of the rows.
        positions: n places in their completions, from 0.

    Returns:
        [n] int64 and [n] float32.

    Raises:
        WeightError: a row's logits are not finite.
    """
    logits /= options.temperature[:, None]
    normaliser = logits.logsumexp(-1)
    if not bool(normaliser.isfinite().all()):
        raise WeightError(
            "the model's logits are not finite: its weights have overflowed or were damaged on their way."
        )
    tokens = logits.argmax(-1) if options.any_greedy else None
    if tokens is None or not options.all_greedy:
        probabilities = (logits - normaliser[:, None]).exp_()
        if options.any_truncated:
            probabilities = apply_top_k_top_p(
                probabilities, top_p=options.top_p, top_k=options.top_k
            )
        points = torch.from_numpy(
            hash_uniforms(options.seeds, np.asarray(positions, dtype=np.uint64))
        )
        drawn = sample_inverse_cdf(probabilities, points=points.to(logits.device))
        tokens = drawn if tokens is None else torch.where(options.is_greedy, tokens, drawn)
    return tokens, logits.gather(-1, tokens[:, None])[:, 0] - normaliser


def hash_uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """[n] float64 in [0, 1): entry ``position`` of the SplitMix64 stream that the mixed seed begins.

    Args:
        seeds: [n] uint64.
        positions: [n] uint64.

    Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", figure 17.
    """
    state = _mix(seeds) + (positions + np.uint64(1)) * _GOLDEN
    return (_mix(state) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def sample_inverse_cdf(probabilities: Tensor, *, points: Tensor) -> Tensor:
    """[n] the first token at which the running sum of probabilities exceeds point x total; never one of probability 0.

    Args:
        probabilities: [n, V] float32, >= 0, not all 0; they need not sum to 1.
        points: [n] float64 in [0, 1).
    """
    num_tokens = probabilities.shape[-1]
    size = min(_BLOCK, num_tokens)
    padded = torch.nn.functional.pad(probabilities, (0, -num_tokens % size)).unflatten(
        -1, (-1, size)
    )
    before = padded.sum(-1, dtype=torch.float64).cumsum(-1)
    target = points * before[:, -1]
    block = (before <= target[:, None]).sum(-1)
    within = padded[torch.arange(len(block), device=block.device), block].cumsum(
        -1, dtype=torch.float64
    )
    start = torch.nn.functional.pad(before, (1, 0)).gather(-1, block[:, None])[:, 0]
    # The block's own running sum may end a rounding below its total.
    inside = torch.minimum(target - start, within[:, -1] * (1 - 2.0**-50)).clamp_min(0)
    found: Tensor = block * size + (within <= inside[:, None]).sum(-1)
    return found


def apply_top_k_top_p(probabilities: Tensor, *, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Zero all but the most likely top_k, and of these all but the fewest that reach top_p of their sum; ties go to the lower id.

    Args:
        probabilities: [n, V].
        top_p: [n] in (0, 1].
        top_k: [n] at least 1.

    Source: Holtzman et al. 2020, arXiv:1904.09751 (top-p); Fan et al. 2018, arXiv:1805.04833 (top-k).
    """
    ordered, tokens = probabilities.sort(stable=True, dim=-1, descending=True)
    rank = torch.arange(ordered.shape[-1], device=ordered.device)
    ordered = ordered.masked_fill(rank >= top_k[:, None], 0.0)
    running = ordered.cumsum(-1, dtype=torch.float64)
    reached = running - ordered >= top_p[:, None].double() * running[:, -1:]
    # top_p of 1 keeps all, whatever the rounding of the running sum; the most likely one always stays.
    ordered = ordered.masked_fill(reached & (top_p[:, None] < 1) & (rank > 0), 0.0)
    return torch.zeros_like(ordered).scatter_(-1, tokens, ordered)


def _mix(state: np.ndarray) -> np.ndarray:
    """The output function of SplitMix64; arithmetic modulo 2^64."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = state ^ (state >> np.uint64(31))
    return mixed
