"""Sample one token per row of logits.

A sampled token depends only on the request's seed, the position and the logits, not on other
requests in the batch. Shapes: n rows, V vocabulary.
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
"""Number of probabilities in a block. Block sums are added afterwards, because one cumulative sum
over all V would lose small probabilities.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSamplingOptions:
    """Sampling options per row."""

    temperature: Tensor
    """[n] float32. It is 1 for a greedy row, so that its log-probs are those at temperature 1."""
    is_greedy: Tensor
    """[n] bool, True for temperature 0."""
    top_p: Tensor
    """[n] float32 in (0, 1]; 1 keeps all tokens."""
    top_k: Tensor
    """[n] int64; a value of V or more keeps all tokens."""
    seeds: np.ndarray
    """[n] uint64, one per request."""
    any_greedy: bool
    all_greedy: bool
    any_truncated: bool
    """True if a row has top_p below 1, or top_k."""

    @classmethod
    def from_configs(
        cls, samplings: Sequence[SamplingConfig], *, seeds: Sequence[int], device: torch.device
    ) -> "TokenSamplingOptions":
        """Collect the options of n requests; seeds are taken modulo 2^64."""
        greedy = [sampling.temperature == 0 for sampling in samplings]
        all_tokens = torch.iinfo(torch.int64).max
        return cls(
            temperature=torch.tensor(
                # Greedy rows must not divide by 0; `is_greedy` marks them.
                [sampling.temperature or 1.0 for sampling in samplings],
                device=device,
            ),
            is_greedy=torch.tensor(greedy, device=device),
            top_p=torch.tensor([sampling.top_p for sampling in samplings], device=device),
            top_k=torch.tensor(
                [sampling.top_k or all_tokens for sampling in samplings], device=device
            ),
            seeds=np.array([seed % 2**64 for seed in seeds], dtype=np.uint64),
            any_greedy=any(greedy),
            all_greedy=all(greedy),
            any_truncated=any(sampling.top_p < 1 or sampling.top_k > 0 for sampling in samplings),
        )


def sample_tokens(
    logits: Tensor, *, options: TokenSamplingOptions, positions: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Sample tokens; return them with their log-probs after temperature, before top-p and top-k.

    Args:
        logits: [n, V] float32. Overwritten.
        options: Options of the rows.
        positions: n positions in the completions, from 0.

    Returns:
        [n] int64 and [n] float32.

    Raises:
        WeightError: If logits are not finite.
    """
    # In place: copying [n, V] float32 would double a decoding step's memory.
    logits /= options.temperature[:, None]
    normalizer = logits.logsumexp(-1)
    # One check covers all logits: a NaN or an infinity in a row makes its logsumexp non-finite.
    if not bool(normalizer.isfinite().all()):
        raise WeightError(
            "the sampler's logits are not finite, so its weights have overflowed or were damaged: "
            "check the gradient norms of the steps before."
        )
    tokens = logits.argmax(-1) if options.any_greedy else None
    if tokens is None or not options.all_greedy:
        probabilities = (logits - normalizer[:, None]).exp_()
        if options.any_truncated:
            probabilities = apply_top_k_top_p(
                probabilities, top_p=options.top_p, top_k=options.top_k
            )
        points = torch.from_numpy(
            hash_uniforms(options.seeds, np.asarray(positions, dtype=np.uint64))
        )
        sampled = sample_inverse_cdf(probabilities, points=points.to(logits.device))
        tokens = sampled if tokens is None else torch.where(options.is_greedy, tokens, sampled)
    return tokens, logits.gather(-1, tokens[:, None])[:, 0] - normalizer


def hash_uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return [n] float64 in [0, 1): element `position` in the SplitMix64 stream for each seed.

    A hash instead of a generator with state, so that batching does not change what a request gets.
    The seed is mixed first: seeds that differ by a multiple of the increment would share a stream
    otherwise.

    Args:
        seeds: [n] uint64.
        positions: [n] uint64.

    Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", figure 17.
    """
    state = _mix(seeds) + (positions + np.uint64(1)) * _GOLDEN
    # Keep 52 bits, which a float64 holds exactly. All 64 bits could round up to 1.
    return (_mix(state) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def sample_inverse_cdf(probabilities: Tensor, *, points: Tensor) -> Tensor:
    """Return one token per row, [n]: the first whose cumulative sum exceeds point * total.

    A token of probability 0 is never returned.

    Args:
        probabilities: [n, V] float32, at least 0 and not all 0. They need not sum to 1.
        points: [n] float64 in [0, 1).
    """
    num_tokens = probabilities.shape[-1]
    size = min(_BLOCK, num_tokens)
    padded = torch.nn.functional.pad(probabilities, (0, -num_tokens % size)).unflatten(
        -1, (-1, size)
    )
    # [n, num_blocks]: the cumulative sum at the end of each block.
    cumsum_at_ends = padded.sum(-1, dtype=torch.float64).cumsum(-1)
    target = points * cumsum_at_ends[:, -1]
    block = (cumsum_at_ends <= target[:, None]).sum(-1)
    block_cumsum = padded[torch.arange(len(block), device=block.device), block].cumsum(
        -1, dtype=torch.float64
    )
    start = torch.nn.functional.pad(cumsum_at_ends, (1, 0)).gather(-1, block[:, None])[:, 0]
    # The cumulative sum inside the block may end slightly below the block's sum, by rounding.
    block_target = torch.minimum(target - start, block_cumsum[:, -1] * (1 - 2.0**-50)).clamp_min(0)
    tokens: Tensor = block * size + (block_cumsum <= block_target[:, None]).sum(-1)
    return tokens


def apply_top_k_top_p(probabilities: Tensor, *, top_p: Tensor, top_k: Tensor) -> Tensor:
    """Keep the top-k probabilities, and of these the fewest that reach top-p; set the rest to 0.

    Top-p is relative to the top-k sum. Among equal probabilities the lower id wins.

    Args:
        probabilities: [n, V].
        top_p: [n] in (0, 1].
        top_k: [n], at least 1.

    Source: Holtzman et al. 2020, arXiv:1904.09751 (top-p); Fan et al. 2018, arXiv:1805.04833
    (top-k).
    """
    ordered, tokens = probabilities.sort(stable=True, dim=-1, descending=True)
    rank = torch.arange(ordered.shape[-1], device=ordered.device)
    ordered = ordered.masked_fill(rank >= top_k[:, None], 0.0)
    running = ordered.cumsum(-1, dtype=torch.float64)
    reached = running - ordered >= top_p[:, None].double() * running[:, -1:]
    # A top_p of 1 keeps all despite rounding in the cumulative sum; the most likely token always
    # stays.
    ordered = ordered.masked_fill(reached & (top_p[:, None] < 1) & (rank > 0), 0.0)
    return torch.zeros_like(ordered).scatter_(-1, tokens, ordered)


def _mix(state: np.ndarray) -> np.ndarray:
    """Apply the output function of SplitMix64; uint64 arithmetic wraps modulo 2^64."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = state ^ (state >> np.uint64(31))
    return mixed
