"""Layout of a micro-batch for attention: sequence bounds, and buckets of padded rows.

The layout is computed once per micro-batch. Sequences of similar length share a bucket and are
padded on the right. That is exact under causal attention: no token attends to the padding after
it, and padding has no gradient.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from temper_engine_api.batch import copy_to_device
from temper_engine_fsdp.model.sequence_parallel import SequenceGroup

CALL_COST = {"cpu": 2048, "cuda": 1 << 18}
"""Cost of an additional SDPA call, in attended position pairs.

Measured: a call takes about 0.2 ms on one CPU thread and 0.1 ms on CUDA.
"""
SHAPES_PER_DOUBLING = 8
"""Number of rounded lengths per power of two."""
MIN_LENGTH_STEP = 128
"""Rounded lengths are multiples of this."""


class Bucket:
    """Sequences that run in one attention call, padded to the same length."""

    def __init__(self, *, num_sequences: int, length: int) -> None:
        self.num_sequences = num_sequences
        self.length = length

    @property
    def num_rows(self) -> int:
        """Number of rows including padding."""
        return self.num_sequences * self.length


class PackLayout:
    """Sequence positions in one micro-batch, and their buckets.

    Not a dataclass: FSDP2 rebuilds dataclass arguments of a module's forward, which would lose
    state.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        device: torch.device,
        rounds_lengths: bool = False,
        sequence_group: SequenceGroup | None = None,
    ) -> None:
        self.sequence_group = sequence_group
        """Ranks that share the pack; None without sequence parallelism."""
        self.num_attention_calls = 0
        """Attention calls that used this layout, not counting compiled layers."""
        self.num_mixer_calls = 0
        """Calls of convolution or state-space layers that used this layout."""
        self.has_window = False
        """True if one of these calls had a sliding window."""
        self.has_softcap = False
        """True if one of these calls had soft-capped scores."""
        if sequence_group is not None and (padding := sequence_group.num_padding(sum(lengths))):
            # The padding is a separate sequence, so no real token attends to it.
            lengths = [*lengths, padding]
        self.max_length = max(lengths)
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        self.starts = copy_to_device(torch.tensor(starts, dtype=torch.int32), device)
        self._lengths = lengths
        self._rounds_lengths = rounds_lengths
        self._masks: dict[tuple[int, int], Tensor] = {}
        self._outer_precision = "highest"

    @cached_property
    def buckets(self) -> list[Bucket]:
        """Groups of sequences that are padded to one length; not needed by torch_varlen."""
        return self._order_and_buckets[1]

    @cached_property
    def _order_and_buckets(self) -> tuple[list[int], list[Bucket]]:
        lengths = (
            [round_length(length) for length in self._lengths]
            if self._rounds_lengths
            else self._lengths
        )
        call_cost = CALL_COST.get(self.starts.device.type, CALL_COST["cuda"])
        return _make_buckets(lengths, call_cost=call_cost)

    @property
    def is_padded(self) -> bool:
        """True if rows differ from tokens."""
        return len(self.buckets) > 1 or self.buckets[0].num_rows != sum(self._lengths)

    @property
    def token_index(self) -> Tensor:
        """[P] index of the token at each padded position."""
        return self._maps[0]

    @property
    def row_index(self) -> Tensor:
        """[T] padded position per token."""
        return self._maps[1]

    @cached_property
    def _maps(self) -> tuple[Tensor, Tensor]:
        order, buckets = self._order_and_buckets
        starts = [0, *accumulate(self._lengths)]
        token_index, row_index = _padding_maps(
            self._lengths, starts=starts, order=order, buckets=buckets
        )
        device = self.starts.device
        return copy_to_device(token_index, device), copy_to_device(row_index, device)

    def sliding_window_mask(self, length: int, *, window: int | None) -> Tensor | None:
        """Return a causal mask over the last `window` positions.

        Returns:
            [length, length] bool, True where attention is allowed; None if the window covers all.
        """
        if window is None or length <= window:
            return None
        return self.causal_mask(length, window=window)

    def causal_mask(self, length: int, *, window: int | None = None) -> Tensor:
        """Return a causal mask [length, length], bool, over all or the last `window` positions."""
        window = length if window is None else min(window, length)
        if (length, window) not in self._masks:
            position = torch.arange(length, device=self.starts.device)
            distance = position[:, None] - position
            self._masks[length, window] = (distance >= 0) & (distance < window)
        return self._masks[length, window]

    def use_exact_matmul(self) -> None:
        """Switch to the default float32 matmul kernels.

        SDPA on a CPU is several times slower with the fast kernels that speed up everything else.
        """
        self._outer_precision = torch.get_float32_matmul_precision()
        if self._outer_precision != "highest":
            torch.set_float32_matmul_precision("highest")

    def restore_matmul_precision(self) -> None:
        """Undo `use_exact_matmul`."""
        if self._outer_precision != "highest":
            torch.set_float32_matmul_precision(self._outer_precision)


def pad_input(
    query: Tensor, key: Tensor, value: Tensor, layout: PackLayout
) -> tuple[Tensor, Tensor, Tensor]:
    """Pad tokens [T, H, D] to rows [P, H, D]."""
    rows: tuple[Tensor, Tensor, Tensor] = _PadInput.apply(query, key, value, layout)  # type: ignore[no-untyped-call]
    return rows


def unpad_output(rows: Tensor, layout: PackLayout) -> Tensor:
    """Remove the padding: rows [P, H, D] to tokens [T, H, D]."""
    tokens: Tensor = _UnpadOutput.apply(rows, layout)  # type: ignore[no-untyped-call]
    return tokens


# Autograd functions rather than a context around the attention: its backward pass runs between
# those of _UnpadOutput and _PadInput, and needs the same matmul kernels.
class _PadInput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, query: Tensor, key: Tensor, value: Tensor, layout: PackLayout
    ) -> tuple[Tensor, ...]:
        ctx.layout = layout  # type: ignore[attr-defined]
        layout.use_exact_matmul()
        if not layout.is_padded:
            return tuple(x.view_as(x) for x in (query, key, value))
        return tuple(x.index_select(0, layout.token_index) for x in (query, key, value))

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        layout: PackLayout = ctx.layout  # type: ignore[attr-defined]
        layout.restore_matmul_precision()
        if not layout.is_padded:
            return (*grads, None)
        # Padding rows repeat tokens but have no gradient, so only real rows are gathered.
        return (*(grad.index_select(0, layout.row_index) for grad in grads), None)


class _UnpadOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, layout: PackLayout) -> Tensor:
        ctx.layout = layout  # type: ignore[attr-defined]
        layout.restore_matmul_precision()
        return rows.index_select(0, layout.row_index) if layout.is_padded else rows.view_as(rows)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        layout: PackLayout = ctx.layout  # type: ignore[attr-defined]
        layout.use_exact_matmul()
        if not layout.is_padded:
            return grad, None
        rows = grad.new_zeros((layout.token_index.shape[0], *grad.shape[1:]))
        return rows.index_copy_(0, layout.row_index, grad), None


def round_length(length: int) -> int:
    """Round a length up to one of eight values per power of two, so that bucket shapes recur.

    cuDNN plans its kernels again for every new shape, which takes 0.1 s on an H200. Padding to a
    rounded length adds at most an eighth, and nothing to a power of two.
    """
    step = max(MIN_LENGTH_STEP, (1 << (length - 1).bit_length()) // (2 * SHAPES_PER_DOUBLING))
    return -(-length // step) * step


def _make_buckets(lengths: Sequence[int], *, call_cost: int) -> tuple[list[int], list[Bucket]]:
    """Group sequences into buckets of minimal total cost.

    A bucket costs `call_cost` plus the squared padded length for each sequence.
    Sequences are sorted by length, longest first, and split by dynamic programming.

    Returns:
        The order of the sequences in the padded rows, and the buckets.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    counts = Counter(lengths)
    sizes = sorted(counts, reverse=True)  # at most sqrt(2 T) distinct lengths
    squares = torch.tensor(sizes, dtype=torch.float64).square()
    num_before = torch.tensor([0, *accumulate(counts[size] for size in sizes)], dtype=torch.float64)
    cost, best_start = torch.zeros(len(sizes) + 1, dtype=torch.float64), [0]
    for end in range(1, len(sizes) + 1):
        # Cheapest way to cover sizes[:end] whose last bucket is sizes[start:end], for every start.
        totals = cost[:end] + call_cost + (num_before[end] - num_before[:end]) * squares[:end]
        best_start.append(int(totals.argmin()))
        cost[end] = totals[best_start[end]]
    # Walk back from the end through the best split points.
    buckets, end = [], len(sizes)
    while end:
        first = best_start[end]
        buckets.append(
            Bucket(
                num_sequences=sum(counts[size] for size in sizes[first:end]), length=sizes[first]
            )
        )
        end = first
    return order, buckets[::-1]


def _padding_maps(
    lengths: Sequence[int],
    *,
    starts: Sequence[int],
    order: Sequence[int],
    buckets: Sequence[Bucket],
) -> tuple[Tensor, Tensor]:
    """Return index maps between tokens and padded rows.

    Returns:
        token_index [P]: Index of the token at each padded position; padding repeats its sequence's
            last token.
        row_index [T]: Padded position per token.
    """
    ordered = torch.tensor(order)
    size = torch.tensor(lengths)[ordered]
    first = torch.tensor(starts[:-1])[ordered]
    padded_lengths = torch.tensor(
        [bucket.length for bucket in buckets for _ in range(bucket.num_sequences)]
    )
    row_start = padded_lengths.cumsum(0) - padded_lengths
    offset_in_sequence = torch.arange(int(padded_lengths.sum())) - torch.repeat_interleave(
        row_start, padded_lengths
    )
    last = torch.repeat_interleave(size - 1, padded_lengths)
    token_index = torch.repeat_interleave(first, padded_lengths) + torch.minimum(
        offset_in_sequence, last
    )
    is_real = offset_in_sequence <= last
    row_index = torch.empty(sum(lengths), dtype=torch.int64)
    row_index[token_index[is_real]] = torch.nonzero(is_real)[:, 0]
    return token_index, row_index
