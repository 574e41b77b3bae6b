"""The descriptions of wrong values, with errors planted in a batch of five sequences."""

import math
from dataclasses import replace

import pytest
import torch

from temper_engine_api.batch import from_sequences
from temper_engine_api.conformance.harness.diagnosis import (
    describe_tensor_errors,
    describe_token_errors,
)
from temper_engine_api.conformance.harness.tolerances import LOGPROB, assert_all_close, assert_close

LENGTHS = (3, 20, 5, 40, 16)
BATCH = from_sequences(
    [torch.zeros(length, dtype=torch.int64) for length in LENGTHS],
    loss_masks=[torch.arange(length) > 0 for length in LENGTHS],
    sample_ids=[100 + b for b in range(len(LENGTHS))],
)
EXPECTED = torch.linspace(1.0, 9.3, sum(LENGTHS), dtype=torch.float64).cos()
STARTS = BATCH.sequence_starts.tolist()


def describe(actual, *, num_ranks=1):
    return describe_token_errors(actual, EXPECTED, max_error=1e-6, batch=BATCH, num_ranks=num_ranks)


def with_error_at(*indices):
    actual = EXPECTED.clone()
    actual[list(indices)] += torch.linspace(0.1, 0.2, len(indices), dtype=torch.float64)
    return actual


@pytest.mark.parametrize(
    ("indices", "pattern"),
    [
        (range(STARTS[1], STARTS[5]), "only after the first sequence"),
        (
            [*range(STARTS[1] + 8, STARTS[2]), *range(STARTS[3] + 8, STARTS[4])],
            "only in sequences of 20 tokens or more, only from position 8 of a sequence on",
        ),
        (range(STARTS[4], STARTS[5]), "only in the last sequence"),
        ([end - 1 for end in STARTS[1:]], "only the last token of each wrong sequence"),
        (STARTS[:-1], "only the first token of each wrong sequence"),
        ([7, 23, 39, 55, 71], "only every 16th token of the batch"),
    ],
    ids=["leak", "window", "last-sequence", "last-token", "first-token", "block"],
)
def test_pattern_of_wrong_tokens_is_named(indices, pattern):
    assert describe(with_error_at(*indices)).endswith(f"{pattern}.")


def test_sequences_without_an_output_are_neither_right_nor_wrong():
    lengths = (5, 4, 1, 6)
    batch = from_sequences(
        [torch.zeros(length, dtype=torch.int64) for length in lengths],
        loss_masks=[torch.arange(length) > 0 for length in lengths],
    )
    expected = torch.arange(16, dtype=torch.float64)
    actual = expected.clone()
    # Position 0 has no output.
    actual[[6, 7, 8, 11, 12, 13, 14, 15]] += torch.linspace(1, 2, 8, dtype=torch.float64)
    message = describe_token_errors(actual, expected, max_error=0.1, batch=batch)
    assert message.endswith("8 of 16 tokens are wrong: only after the first sequence.")


def test_wrong_temperatures_are_named():
    batch = replace(BATCH, temperature=torch.tensor([1.0, 0.5, 2.0, 1.0, 1.0]))
    actual = with_error_at(*range(STARTS[1] + 1, STARTS[2]), *range(STARTS[2] + 1, STARTS[3]))
    message = describe_token_errors(actual, EXPECTED, max_error=1e-6, batch=batch)
    assert message.endswith("wrong: only in sequences with a temperature other than 1.")


def test_worst_token_is_named_with_sequence_sample_and_values():
    message = describe(with_error_at(STARTS[2] + 1, STARTS[3] + 7))
    value = float(EXPECTED[STARTS[3] + 7])
    assert message.startswith(
        "The largest error is at token 7 of sequence 3 (sample 103, 40 tokens): "
        f"{value + 0.2:.6g}, expected {value:.6g}. 2 of 84 tokens are wrong"
    )


def test_rank_is_named_if_only_one_is_wrong():
    message = describe(with_error_at(*range(STARTS[3], STARTS[4])), num_ranks=2)
    assert ", on data-parallel rank " in message
    assert "only on data-parallel rank " in message


def test_constant_factor_and_offset_are_recognized():
    assert "all values are the expected ones times 0.5" in describe(0.5 * EXPECTED)
    assert "all values are the expected ones plus 0.25" in describe(EXPECTED + 0.25)


def test_nan_is_the_largest_error():
    actual = with_error_at(4)
    actual[50] = math.nan
    assert "token 22 of sequence 3 (sample 103, 40 tokens): nan" in describe(actual)


def test_wrong_vectors_and_their_factor_are_named():
    expected = {"a": torch.eye(3), "a.bias": torch.arange(3.0), "b.bias": torch.ones(2)}
    actual = {"a": torch.eye(3), "a.bias": 2 * torch.arange(3.0), "b.bias": 2 * torch.ones(2)}
    assert describe_tensor_errors(actual, expected, wrong=["b.bias", "a.bias"]) == (
        "2 of 3 tensors are wrong, all of them vectors: a.bias, b.bias, by the factor 2."
    )


def test_wrong_scores_name_their_sequences():
    expected = torch.tensor([0.5, 1.0, -2.0, 4.0, 3.0])
    actual = expected + torch.tensor([0.0, 0.1, 0.0, 0.3, 0.0])
    with pytest.raises(AssertionError, match="only in sequences of 20 tokens or more") as caught:
        assert_close(actual, expected, LOGPROB, quantity="scores", batch=BATCH)
    assert "at sequence 3 (sample 103, 40 tokens): 4.3, expected 4. 2 of 5" in str(caught.value)


def test_failed_comparisons_name_the_wrong_values():
    with pytest.raises(AssertionError, match=r"log-probs differs .* token 1 of sequence 2"):
        assert_close(
            with_error_at(STARTS[2] + 1), EXPECTED, LOGPROB, quantity="log-probs", batch=BATCH
        )
    with pytest.raises(AssertionError, match=r"gradient of b differs .* 1 of 2 tensors are wrong"):
        assert_all_close(
            {"a": torch.ones(2), "b": torch.zeros(2)},
            {"a": torch.ones(2), "b": torch.ones(2)},
            LOGPROB,
            quantity="gradient",
        )
