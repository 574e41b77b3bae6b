"""Test sampling of a token: uniform numbers, inverse of the cumulative sum, top-k and top-p."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from temper_trainer.config.rollout import SamplingConfig
from temper_trainer.rollout.token_sampling import (
    TokenSamplingOptions,
    apply_top_k_top_p,
    hash_uniforms,
    sample_inverse_cdf,
    sample_tokens,
)


def cut(probabilities: list[float], *, top_p: float = 1.0, top_k: int = 100) -> list[float]:
    kept = apply_top_k_top_p(
        torch.tensor([probabilities]), top_p=torch.tensor([top_p]), top_k=torch.tensor([top_k])
    )
    return [round(value, 6) for value in kept[0].tolist()]


def test_uniforms_equal_the_published_generator() -> None:
    # SplitMix64 seeded with 0 begins 16294208416658607535, 7960286522194355700 (the JDK's and
    # Vigna's reference output); ours seeds it with the mix of 0, which is 0.
    uniforms = hash_uniforms(np.zeros(2, dtype=np.uint64), np.arange(2, dtype=np.uint64))
    assert uniforms.tolist() == [
        (16294208416658607535 >> 12) / 2**52,
        (7960286522194355700 >> 12) / 2**52,
    ]


def test_uniforms_are_uniform_over_seeds_and_over_positions() -> None:
    for seeds, positions in (
        (np.arange(10_000), np.zeros(10_000)),
        (np.zeros(10_000), np.arange(10_000)),
    ):
        uniforms = hash_uniforms(seeds.astype(np.uint64), positions.astype(np.uint64))
        counts = np.histogram(uniforms, bins=10, range=(0, 1))[0]
        # 1000 expected in each bin, deviation sqrt(1000 * 0.9) = 30: six of them.
        assert abs(counts - 1000).max() < 180
        assert abs(np.corrcoef(uniforms[:-1], uniforms[1:])[0, 1]) < 0.06


def test_point_selects_the_token_at_which_the_cumulative_sum_exceeds_it() -> None:
    probabilities = torch.tensor([[0.25, 0.0, 0.5, 0.25]]).repeat(6, 1)
    points = torch.tensor([0.0, 0.24, 0.25, 0.74, 0.75, 1 - 2.0**-52], dtype=torch.float64)
    # Running sums .25, .25, .75, 1: a point equal to one belongs to the next token of positive
    # probability.
    assert sample_inverse_cdf(probabilities, points=points).tolist() == [0, 0, 2, 2, 3, 3]


WEIGHTS = [float(np.float32(weight)) for weight in (0.0, 1e-30, 1e-6, 0.1, 1.0)]


@given(
    weights=arrays.arrays(np.float32, st.integers(1, 2500), elements=st.sampled_from(WEIGHTS)),
    point=st.floats(0, 1, exclude_max=True),
)
def test_token_of_probability_zero_is_never_sampled(weights: np.ndarray, point: float) -> None:
    weights[len(weights) // 2] = 0.5
    (token,) = sample_inverse_cdf(
        torch.from_numpy(weights)[None], points=torch.tensor([point], dtype=torch.float64)
    ).tolist()
    running = weights.astype(np.float64).cumsum()
    assert weights[token] > 0
    assert running[token] >= point * running[-1] * (1 - 1e-12)
    assert running[token] - weights[token] <= point * running[-1] * (1 + 1e-12)


def test_top_k_and_top_p_keep_the_fewest_most_likely() -> None:
    probabilities = [0.1, 0.4, 0.2, 0.3]
    assert cut(probabilities, top_k=2) == [0, 0.4, 0, 0.3]
    # 0.4 + 0.3 reach 0.7; 0.71 needs 0.2 too.
    assert cut(probabilities, top_p=0.65) == [0, 0.4, 0, 0.3]
    assert cut(probabilities, top_p=0.75) == [0, 0.4, 0.2, 0.3]
    assert cut(probabilities, top_p=0.01) == [0, 0.4, 0, 0]
    # Of the top three, which sum to 0.9, half is 0.45: 0.4 and 0.3.
    assert cut(probabilities, top_k=3, top_p=0.5) == [0, 0.4, 0, 0.3]
    assert cut(probabilities) == probabilities


def test_lower_ids_win_among_equal_probabilities() -> None:
    assert cut([0.25, 0.25, 0.25, 0.25], top_k=2) == [0.25, 0.25, 0, 0]


def test_sampled_tokens_have_the_models_distribution() -> None:
    samplings = [SamplingConfig(temperature=0.5)] * 20_000
    options = TokenSamplingOptions.from_configs(
        samplings, seeds=range(20_000), device=torch.device("cpu")
    )
    logits = torch.tensor([0.0, 0.5, 1.0]).log1p().repeat(20_000, 1)
    tokens, logprobs = sample_tokens(logits, options=options, positions=[3] * 20_000)
    # exp(2 log(1 + x)) = (1 + x)^2: weights 1, 2.25 and 4 of 7.25; deviation sqrt(20000 / 4) = 71
    # at most: five of them.
    expected = torch.tensor([1.0, 2.25, 4.0]) / 7.25
    assert (tokens.bincount(minlength=3) - 20_000 * expected).abs().max() < 355
    torch.testing.assert_close(logprobs, expected[tokens].log())
