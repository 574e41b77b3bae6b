"""Attention over packed sequences: the layout of a micro-batch and the kernels.

The kernels are registered with transformers and never build a mask over the pack. The layout is
computed once per micro-batch and reaches them through keyword arguments of the model. For SDPA,
sequences of similar length share a bucket and are padded on the right. That is exact under causal
attention: no token attends to the padding after it, and padding has no gradient.
"""

import inspect
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import AttentionInterface

from temper_engine_api.batch import copy_to_device
from temper_engine_api.errors import CapabilityError, ConfigError
from temper_engine_fsdp.config import AttentionKernel
from temper_engine_fsdp.model.scored_attention import (
    add_sink_to_mask,
    add_sinks,
    attend_with_softcap,
)
from temper_engine_fsdp.model.sequence_parallel import SequenceGroup, parallelize_attention

CALL_COST = {"cpu": 2048, "cuda": 1 << 18}
"""Cost of an additional SDPA call, in attended position pairs.

Measured: a call takes about 0.2 ms on one CPU thread and 0.1 ms on CUDA.
"""


SHAPES_PER_DOUBLING = 8
"""Number of rounded lengths per power of two."""
MIN_LENGTH_STEP = 128
"""Rounded lengths are multiples of this."""
CUDNN_MIN_LENGTH = 2048
"""Shortest bucket that runs on cuDNN rather than on FlashAttention 2.

On an H200 in bf16, cuDNN halves the time for a causal sequence with 16,384 tokens, forward and
backward. Below this length attention is a small part of an update.
"""


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
        token_index [P]: Index of the token at each padded position; padding repeats the last token
            of its sequence.
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


# Without "sdpa", because transformers refuses such names for models with sinks.
SDPA_VARLEN = "temper_padded_varlen"
TORCH_VARLEN = "temper_torch_varlen"

_HAS_GQA_FLAG = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""True if varlen_attn needs a flag for grouped heads, as it does after torch 2.11."""

IGNORED_ARGUMENTS = frozenset(
    (
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "use_cache",
    )
)
"""Arguments that models pass to their attention and that no kernel of transformers reads."""


@torch.compiler.disable  # type: ignore[untyped-decorator]  # number of buckets varies
def sdpa_varlen_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    packing: PackLayout,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Compute causal attention with SDPA, one call per bucket.

    Args:
        module: Attention module.
        query: [1, H, T, D].
        key: [1, K, T, D], K key-value heads.
        value: [1, K, T, D'], possibly narrower than the queries.
        attention_mask: Must be None.
        scaling: Factor of the attention scores.
        packing: Layout of the pack.
        dropout: Dropout probability.
        sliding_window: Number of positions each token attends to; None means all.
        softcap: Limit of the attention scores; None means none.
        s_aux: [H] logits of attention sinks; None means none.
        **options: Other arguments of the model; refused if they would change the result.

    Returns:
        [1, T, H, D'] and None, as transformers expects.

    Raises:
        CapabilityError: If the model needs another kind of attention.
    """
    if softcap is not None and s_aux is not None:
        options["s_aux"] = s_aux  # no known model has both
    _refuse(module, attention_mask, **options)
    input_dtype = value.dtype
    # To [T, H, D].
    query, key, value = (
        x[0].transpose(0, 1).to(_compute_dtype(value)) for x in (query, key, value)
    )
    columns = pad_input(query, key, value, packing)
    sizes = [bucket.num_rows for bucket in packing.buckets]
    parts = []
    for bucket, *qkv in zip(packing.buckets, *(x.split(sizes) for x in columns), strict=True):
        q, k, v = (
            x.reshape(bucket.num_sequences, bucket.length, *x.shape[1:]).transpose(1, 2)
            for x in qkv
        )
        if softcap is None:
            mask = packing.sliding_window_mask(bucket.length, window=sliding_window)
            out = _attend_with_sdpa(
                q, k, v, mask=mask, dropout=dropout, scaling=scaling, sinks=s_aux
            )
        else:
            out = attend_with_softcap(
                q,
                k,
                v,
                mask=packing.causal_mask(bucket.length, window=sliding_window),
                scaling=scaling,
                softcap=softcap,
                dropout_p=dropout,
            )
        parts.append(out.transpose(1, 2).flatten(0, 1))  # values may be narrower than queries
    rows = torch.cat(parts) if len(parts) > 1 else parts[0]
    return unpad_output(rows, packing)[None].to(input_dtype), None


def _attend_with_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None,
    dropout: float,
    scaling: float,
    sinks: Tensor | None,
) -> Tensor:
    """Run SDPA on rows [N, H, L, D]; without a mask it is causal."""
    length = query.shape[2]
    if sinks is not None:
        query, key, value = add_sinks(query, key, value, sinks=sinks, scaling=scaling)
        mask = None if mask is None else add_sink_to_mask(mask)
    with _sdpa_backends(query, length=length):
        out = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    return out if sinks is None else out[:, :, 1:]


def _sdpa_backends(query: Tensor, *, length: int) -> AbstractContextManager[None]:
    """Prefer cuDNN for long buckets on CUDA and FlashAttention 2 for short ones."""
    if query.device.type != "cuda" or query.dtype == torch.float32:
        return nullcontext()
    preferred = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    if length < CUDNN_MIN_LENGTH:
        # Short buckets differ in their number of sequences, and cuDNN would plan for each number.
        preferred.reverse()
    # A backend that does not support the call, such as one with a mask, is skipped.
    others = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    backends: AbstractContextManager[None] = sdpa_kernel([*preferred, *others], set_priority=True)
    return backends


def _compute_dtype(value: Tensor) -> torch.dtype:
    # SDPA on a CPU is two to three times slower in bf16 than in float32 for these small blocks.
    return torch.float32 if value.device.type == "cpu" else value.dtype


def torch_varlen_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    packing: PackLayout,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Compute causal attention with torch's variable-length flash attention (CUDA, bf16 or fp16).

    Same arguments as `sdpa_varlen_forward`, which computes sinks and soft-capping instead: the
    kernel has no argument for them.
    """
    if softcap is not None or s_aux is not None:
        padded: tuple[Tensor, None] = sdpa_varlen_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            scaling=scaling,
            packing=packing,
            dropout=dropout,
            sliding_window=sliding_window,
            softcap=softcap,
            s_aux=s_aux,
            **options,
        )
        return padded
    _refuse(module, attention_mask, **options)
    # A model whose config names its dropout otherwise than `read_attention_dropout` knows.
    check_dropout("torch_varlen", dropout=dropout)
    # Rotary embeddings may leave query and key in float32; the kernel wants the compute dtype.
    q, k, v = (x[0].transpose(0, 1).to(value.dtype).contiguous() for x in (query, key, value))
    # (left, right): -1 is unlimited, and 0 to the right makes it causal. transformers' window
    # includes the token itself, the kernel's does not.
    window = (-1, 0) if sliding_window is None else (sliding_window - 1, 0)
    starts, longest = packing.starts, packing.max_length
    is_grouped = q.shape[1] != k.shape[1]
    if is_grouped and _HAS_GQA_FLAG:
        attended = varlen_attn(
            q,
            k,
            v,
            starts,
            starts,
            longest,
            longest,
            scale=scaling,
            window_size=window,
            enable_gqa=True,
        )
    else:
        attended = varlen_attn(
            q, k, v, starts, starts, longest, longest, scale=scaling, window_size=window
        )
    assert isinstance(attended, Tensor)
    return attended[None], None


def _refuse(module: torch.nn.Module, attention_mask: Tensor | None, **options: object) -> None:
    """Reject options that the kernels do not support, such as a mask."""
    if options.pop("is_causal", True) is False or vars(module).get("is_causal") is False:
        raise CapabilityError(
            f"{type(module).__name__} attends to later tokens, but packed attention is causal: "
            "choose another model."
        )
    unsupported = [
        name
        for name, value in options.items()
        if name not in IGNORED_ARGUMENTS and value is not None and value is not False
    ]
    if attention_mask is not None:
        unsupported.insert(0, "an attention mask")
    if unsupported:
        raise CapabilityError(
            f"{type(module).__name__} passes {', '.join(unsupported)} to its attention, which "
            "packed attention does not support: choose a model with causal attention, with or "
            "without a sliding window, sinks or soft-capping."
        )


def choose_kernel(
    requested: AttentionKernel, *, device: torch.device, compute: str, dropout: float
) -> str:
    """Return the registered name of the attention kernel.

    Args:
        requested: Kernel of the configuration.
        device: Device of the engine.
        compute: Compute dtype.
        dropout: Dropout probability of the model's attention.

    Raises:
        ConfigError: If the requested kernel cannot run on the device, or has no dropout.
    """
    if requested == "torch_varlen" and device.type != "cuda":
        raise ConfigError(
            "attention torch_varlen needs CUDA, but this engine runs on the CPU: use auto or "
            "sdpa_varlen."
        )
    check_dropout(requested, dropout=dropout)
    if requested == "torch_varlen" or (
        requested == "auto" and device.type == "cuda" and compute != "fp32" and not dropout
    ):
        return TORCH_VARLEN
    return SDPA_VARLEN


def check_dropout(requested: AttentionKernel, *, dropout: float) -> None:
    """Check that the requested kernel can drop attention weights as the model does in training.

    Raises:
        ConfigError: If it cannot.
    """
    if requested == "torch_varlen" and dropout:
        raise ConfigError(
            f"attention torch_varlen has no dropout, but the model sets it to {dropout}: use auto "
            "or sdpa_varlen."
        )


def register_kernels() -> None:
    """Register both kernels with transformers; idempotent.

    No mask function is registered. transformers then builds no mask and does not search the
    position ids for sequences, which on CUDA would sync the host in every pass.
    """
    for name, forward in ((SDPA_VARLEN, sdpa_varlen_forward), (TORCH_VARLEN, torch_varlen_forward)):
        AttentionInterface.register(name, parallelize_attention(forward))
