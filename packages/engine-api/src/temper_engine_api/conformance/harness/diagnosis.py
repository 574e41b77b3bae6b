"""Describe where wrong values are, so that a failed test points to a likely cause.

A tolerance says that values differ and how far. An engine's author also wants to know which
sequence, token and rank to look at, and what the wrong values have in common.
"""

import itertools
import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.plan import plan_mini_batch

MAX_NAMES = 3
"""Number of tensor names that a message lists."""
MIN_PERIOD = 8
"""Shortest distance of wrong tokens that is reported as a block size."""


def describe_token_errors(
    actual: Tensor, expected: Tensor, *, max_error: float, batch: SequenceBatch, num_ranks: int = 1
) -> str:
    """Return sentences about the worst token and about what the wrong tokens have in common.

    Args:
        actual: [T] or [T, K] float64 values for the batch's tokens.
        expected: The same shape.
        max_error: Largest absolute difference of a correct entry.
        batch: The batch that was computed.
        num_ranks: Number of data-parallel ranks that its sequences were divided between.

    Example:
        >>> from temper_engine_api.batch import from_sequences
        >>> batch = from_sequences(
        ...     [torch.zeros(3, dtype=torch.int64)] * 2,
        ...     loss_masks=[torch.arange(3) > 0] * 2,
        ...     sample_ids=[100, 101],
        ... )
        >>> expected = torch.tensor([1.0, 2, 3, 4, 5, 6])
        >>> actual = torch.tensor([1.0, 2, 3, 4, 5, 9])
        >>> describe_token_errors(actual, expected, max_error=0.1, batch=batch)
        'The largest error is at token 2 of sequence 1 (sample 101, 3 tokens): 9, expected 6. \
1 of 6 tokens are wrong: only after the first sequence, only the last token of each wrong \
sequence.'
    """
    errors = (actual - expected).abs().nan_to_num(nan=math.inf).reshape(len(expected), -1)
    worst = int(errors.max(dim=1).values.argmax())
    column = int(errors[worst].argmax())
    lengths = batch.lengths
    sequence_of = torch.repeat_interleave(torch.arange(batch.num_sequences), lengths)
    position = torch.arange(len(expected)) - batch.sequence_starts[:-1][sequence_of]
    b = int(sequence_of[worst])
    ranks = _assign_ranks(batch, num_ranks)
    of_rank = f", on data-parallel rank {ranks[b]}" if num_ranks > 1 else ""
    actual_value, expected_value = (
        float(values.reshape(len(expected), -1)[worst, column]) for values in (actual, expected)
    )
    is_wrong = errors.max(dim=1).values > max_error
    pattern = _find_factor(actual, expected, max_error=max_error) or _find_token_pattern(
        is_wrong, sequence_of=sequence_of, position=position, batch=batch, ranks=ranks
    )
    return (
        f"The largest error is at token {int(position[worst])} of sequence {b} (sample "
        f"{int(batch.sample_ids[b])}, {int(lengths[b])} tokens{of_rank}): {actual_value:.6g}, "
        f"expected {expected_value:.6g}. {int(is_wrong.sum())} of {len(expected)} tokens are wrong"
        f"{f': {pattern}' if pattern else ''}."
    )


def describe_sequence_errors(
    actual: Tensor, expected: Tensor, *, max_error: float, batch: SequenceBatch, num_ranks: int = 1
) -> str:
    """Return sentences about the worst sequence and about the wrong ones.

    Args:
        actual: [B] float64 values for the batch's sequences.
        expected: The same shape.
        max_error: Largest absolute difference of a correct entry.
        batch: The batch that was computed.
        num_ranks: Number of data-parallel ranks that its sequences were divided between.
    """
    errors = (actual - expected).abs().nan_to_num(nan=math.inf)
    wrong = (errors > max_error).nonzero()[:, 0].tolist()
    b = int(errors.argmax())
    ranks = _assign_ranks(batch, num_ranks)
    patterns = [
        _find_factor(actual, expected, max_error=max_error)
        or _find_sequence_pattern(wrong, compared=list(range(len(expected))), batch=batch),
        _find_rank_pattern(wrong, ranks=ranks),
    ]
    pattern = ", ".join(filter(None, patterns))
    of_rank = f", on data-parallel rank {ranks[b]}" if num_ranks > 1 else ""
    return (
        f"The largest error is at sequence {b} (sample {int(batch.sample_ids[b])}, "
        f"{int(batch.lengths[b])} tokens{of_rank}): {float(actual[b]):.6g}, expected "
        f"{float(expected[b]):.6g}. {len(wrong)} of {len(expected)} sequences are wrong"
        f"{f': {pattern}' if pattern else ''}."
    )


def _assign_ranks(batch: SequenceBatch, num_ranks: int) -> list[int]:
    """Return the data-parallel rank of each sequence, as `measurements.rank_slice` plans it."""
    ranks = [0] * batch.num_sequences
    if num_ranks > 1:
        plan = plan_mini_batch(
            batch.lengths.tolist(),
            pack_group_ids=batch.pack_group_ids.tolist(),
            dp_size=num_ranks,
            max_tokens=1 << 20,
        )
        for rank, rank_plan in enumerate(plan.ranks):
            for b in itertools.chain.from_iterable(rank_plan.micro_batches):
                ranks[b] = rank
    return ranks


def _find_factor(actual: Tensor, expected: Tensor, *, max_error: float) -> str:
    """Return the factor or offset that explains all values, or ""."""
    if not bool(actual.isfinite().all()) or expected.numel() < 2:
        return ""
    square = float(expected.square().sum())
    factor = float((actual * expected).sum()) / square if square else 0.0
    if float((actual - factor * expected).abs().max()) <= max_error:
        return f"all values are the expected ones times {factor:.4g}"
    offset = float((actual - expected).mean())
    if float((actual - expected - offset).abs().max()) <= max_error:
        return f"all values are the expected ones plus {offset:.4g}"
    return ""


def _find_token_pattern(
    is_wrong: Tensor,
    *,
    sequence_of: Tensor,
    position: Tensor,
    batch: SequenceBatch,
    ranks: list[int],
) -> str:
    """Return what all wrong tokens have in common and most right ones do not, or "".

    Args:
        is_wrong: [T] bool.
        sequence_of: [T] sequence index per token.
        position: [T] position of each token in its sequence.
        batch: The batch that was computed.
        ranks: Data-parallel rank per sequence.
    """
    lengths = batch.lengths
    wrong_sequences = sorted(set(sequence_of[is_wrong].tolist()))
    wrong_positions = position[is_wrong]
    if not wrong_sequences:
        return ""
    # Position 0 has no output in any engine, so a sequence of one token is never wrong.
    compared = sorted({*(lengths > 1).nonzero()[:, 0].tolist(), *wrong_sequences})
    patterns = [
        _find_rank_pattern(wrong_sequences, ranks=ranks),
        _find_sequence_pattern(wrong_sequences, compared=compared, batch=batch),
    ]
    first = int(wrong_positions.min())
    if bool((wrong_positions == lengths[sequence_of[is_wrong]] - 1).all()):
        patterns.append("only the last token of each wrong sequence")
    elif int(wrong_positions.max()) == 0:
        patterns.append("only the first token of each wrong sequence")
    # Position 1 is the first with an output.
    elif first > 1:
        patterns.append(f"only from position {first} of a sequence on")
    period = math.gcd(*is_wrong.nonzero().flatten().diff().tolist())
    if period >= MIN_PERIOD:
        patterns.append(f"only every {period}th token of the batch")
    return ", ".join(filter(None, patterns))


def _find_rank_pattern(wrong: Collection[int], *, ranks: list[int]) -> str:
    """Return the rank that alone has the wrong sequences, or ""."""
    wrong_ranks = {ranks[b] for b in wrong}
    is_one = len(wrong_ranks) == 1 < len(set(ranks))
    return f"only on data-parallel rank {wrong_ranks.pop()}" if is_one else ""


def _find_sequence_pattern(wrong: list[int], *, compared: list[int], batch: SequenceBatch) -> str:
    """Return what the wrong sequences have in common and the others do not, or "".

    Args:
        wrong: Indices of the wrong sequences in ascending order.
        compared: The same for all sequences that have an output.
        batch: The batch that was computed.
    """
    lengths = batch.lengths
    right = sorted(set(compared) - set(wrong))
    if not wrong or not right:
        return ""
    if wrong == compared[1:]:
        return "only after the first sequence"
    if int(lengths[right].max()) < int(lengths[wrong].min()):
        return f"only in sequences of {int(lengths[wrong].min())} tokens or more"
    if wrong == compared[-1:]:
        return "only in the last sequence"
    if wrong == [b for b in compared if batch.temperature[b] != 1]:
        return "only in sequences with a temperature other than 1"
    return f"only in the sequences {wrong[:8]}"


def describe_tensor_errors(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, wrong: Collection[str]
) -> str:
    """Return a sentence about the wrong tensors among those compared by name.

    Args:
        actual: Measured tensors.
        expected: Tensors of the same names and shapes.
        wrong: Names of the tensors that differ by more than their tolerance; not empty.

    Example:
        >>> expected = {"a.weight": torch.eye(2), "b.weight": torch.ones(2, 2)}
        >>> actual = {"a.weight": 2 * torch.eye(2), "b.weight": torch.ones(2, 2)}
        >>> describe_tensor_errors(actual, expected, wrong=["a.weight"])
        '1 of 2 tensors are wrong: a.weight, by the factor 2.'
    """
    names = sorted(wrong)
    listed = ", ".join(names[:MAX_NAMES]) + (", ..." if len(names) > MAX_NAMES else "")
    factors = [_measure_factor(actual[name].double(), expected[name].double()) for name in names]
    known = [factor for factor in factors if factor is not None]
    spread = max(known) - min(known) if known else 0.0
    factor = (
        f", by the factor {known[0]:.4g}"
        if len(known) == len(names) and spread <= 1e-3 * abs(known[0])
        else ""
    )
    shape = (
        ", all of them vectors"
        if all(expected[name].ndim == 1 for name in names)
        and any(tensor.ndim > 1 for tensor in expected.values())
        else ""
    )
    return f"{len(names)} of {len(expected)} tensors are wrong{shape}: {listed}{factor}."


def _measure_factor(actual: Tensor, expected: Tensor) -> float | None:
    """Return c if actual is c times expected, within a thousandth; else None."""
    square = float(expected.square().sum())
    if not square or not bool(actual.isfinite().all()):
        return None
    factor = float((actual * expected).sum()) / square
    residual = float((actual - factor * expected).square().sum())
    return factor if residual <= 1e-6 * factor**2 * square else None
