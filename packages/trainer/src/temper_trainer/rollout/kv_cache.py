"""A KV cache with one slot per sequence, and attention that reads and writes it.

The first n slots are in use, so a decoding step reads views instead of gathered copies. Models call
this through transformers' attention interface under the name SLOT_ATTENTION. The keyword argument
`slots` of a forward pass is the Attention object for that pass.

Shapes: n slots in use, L query positions, H key-value heads, G query heads per key-value head, S
cached positions, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

SLOT_ATTENTION = "temper_slots"
"""Name of this module's attention in transformers' attention interface."""
_BLOCK = 64
"""Capacity grows in multiples of this many positions."""


QUERY_BLOCK_SCORES = 1 << 26
"""Number of scores per query block without a fused kernel; bounds the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRule:
    """Scale, mask and other changes to a layer's scores before the softmax."""

    scale: float
    """Factor of the scores."""
    window: int | None = None
    """Size of the sliding window; None for full attention."""
    softcap: float | None = None
    """Limit of the scores, softcap * tanh(scores / softcap) as in Gemma 2; None for no limit."""
    sinks: Tensor | None = None
    """[H x G] logits in the softmax that add nothing to the output, as in gpt-oss."""

    @property
    def supports_fused(self) -> bool:
        """True if torch's fused attention can apply the rule."""
        return self.softcap is None and self.sinks is None

    def is_hidden(self, distance: Tensor) -> Tensor:
        """Return True where a key is not visible, by the query's position minus the key's."""
        is_later = distance < 0
        return is_later if self.window is None else is_later | (distance >= self.window)


class Attention(Protocol):
    """The attention of one forward pass."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, rule: ScoreRule
    ) -> Tensor:
        """Return [rows, H x G, L, D'].

        Args:
            layer: Index of the layer.
            query: [rows, H x G, L, D].
            key: [rows, H, L, D].
            value: [rows, H, L, D'].
            rule: The layer's rule for the scores.
        """
        ...


class CausalAttention:
    """Causal attention over full sequences, padded on the right, without a cache."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, rule: ScoreRule
    ) -> Tensor:
        """Attend within each row; see Attention."""
        length = query.shape[2]
        if not rule.supports_fused:
            return self._attend_in_blocks(query, key, value, rule=rule)
        if rule.window is None or length <= rule.window:
            # Not attn_mask: the fastest fused kernels support only is_causal.
            return functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=rule.scale, enable_gqa=True
            )
        positions = torch.arange(length, device=query.device)
        mask = ~rule.is_hidden(positions[:, None] - positions)
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=rule.scale, enable_gqa=True
        )

    def _attend_in_blocks(
        self, query: Tensor, key: Tensor, value: Tensor, *, rule: ScoreRule
    ) -> Tensor:
        """Attend with blocks of queries, so that not all scores exist at a time."""
        rows, num_heads, length, _ = query.shape
        block = max(1, QUERY_BLOCK_SCORES // (rows * num_heads * length))
        positions = torch.arange(length, device=query.device)
        return torch.cat(
            [
                _attend_scores(
                    query[:, :, first : first + block],
                    key[:, :, : first + block],
                    value[:, :, : first + block],
                    is_hidden=rule.is_hidden(
                        positions[first : first + block, None] - positions[: first + block]
                    ),
                    rule=rule,
                )
                for first in range(0, length, block)
            ],
            dim=2,
        )


def _attend_scores(
    query: Tensor, key: Tensor, value: Tensor, *, is_hidden: Tensor, rule: ScoreRule
) -> Tensor:
    """Compute attention with explicit scores; return [rows, H x G, L, D'].

    Args:
        query: [rows, H x G, L, D].
        key: [rows, H, S, D].
        value: [rows, H, S, D'].
        is_hidden: [L, S], or [rows, L, S] with another mask for each row.
        rule: The layer's rule for the scores.
    """
    rows, num_heads, length, _ = query.shape
    # A key-value head's G query heads become rows of one query, instead of repeating keys and
    # values G times.
    grouped = query.reshape(rows, key.shape[1], -1, query.shape[-1])
    scores = (grouped @ key.transpose(2, 3) * rule.scale).view(rows, num_heads, length, -1)
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    scores = scores.masked_fill(
        is_hidden if is_hidden.ndim == 2 else is_hidden[:, None], -torch.inf
    )
    if rule.sinks is not None:
        sinks = rule.sinks.to(scores.dtype)[None, :, None, None]
        scores = torch.cat([scores, sinks.expand(rows, -1, length, 1)], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32)[..., : key.shape[2]].to(value.dtype)
    output = weights.view(rows, key.shape[1], -1, key.shape[2]) @ value
    return output.view(rows, num_heads, length, value.shape[-1])


class SlotKVCache:
    """Keys and values per layer, [slots, H, S, D] each, allocated at the first write.

    Values may have another D than keys.
    """

    def __init__(self, *, num_layers: int) -> None:
        self._keys: list[Tensor] = [torch.empty(0)] * num_layers
        self._values: list[Tensor] = [torch.empty(0)] * num_layers
        self._num_slots = 0
        self._length = 0

    def reserve(self, *, num_slots: int, length: int, max_length: int) -> None:
        """Make room for `num_slots` slots of `length` positions.

        Positions grow by at least a half, up to `max_length`, so that copies are rare. Slots above
        `num_slots` are freed when the cache is reallocated.
        """
        if num_slots <= self._num_slots and length <= self._length:
            return
        if length > self._length:
            grown = min(max_length, max(length, self._length + self._length // 2))
            # In blocks, so that a decoding step does not reallocate for every new token.
            self._length = -(-grown // _BLOCK) * _BLOCK
        self._num_slots = num_slots
        for layer, (keys, values) in enumerate(zip(self._keys, self._values, strict=True)):
            # A layer without a first write has no number of heads yet.
            if keys.ndim == 4:
                self._keys[layer] = self._resize(keys)
                self._values[layer] = self._resize(values)

    def copy_slot(self, *, source: int, target: int) -> None:
        """Copy slot `source` to slot `target`."""
        for tensors in (self._keys, self._values):
            for tensor in tensors:
                if tensor.ndim == 4:
                    tensor[target] = tensor[source]

    def write(self, layer: int, key: Tensor, value: Tensor, *, slots: Tensor, rows: Tensor) -> None:
        """Write key[rows[i]] and value[rows[i]] to the first L positions of slots[i].

        Both are [H, L, D].
        """
        self._allocate(layer, key, value)
        length = key.shape[2]
        self._keys[layer][slots, :, :length] = key[rows]
        self._values[layer][slots, :, :length] = value[rows]

    def append(
        self,
        layer: int,
        key: Tensor,
        value: Tensor,
        *,
        slots: Tensor,
        positions: Tensor,
        length: int,
    ) -> tuple[Tensor, Tensor]:
        """Write one position per slot to the first n slots; return views [n, H, length, D]."""
        self._allocate(layer, key, value)
        keys, values = self._keys[layer], self._values[layer]
        keys[slots, :, positions] = key[:, :, 0]
        values[slots, :, positions] = value[:, :, 0]
        return keys[: len(slots), :, :length], values[: len(slots), :, :length]

    def _allocate(self, layer: int, key: Tensor, value: Tensor) -> None:
        if self._keys[layer].ndim != 4:
            # Zeros, not uninitialized memory: a masked position has weight 0, but 0 x NaN is NaN.
            self._keys[layer], self._values[layer] = (
                like.new_zeros((self._num_slots, like.shape[1], self._length, like.shape[3]))
                for like in (key, value)
            )

    def _resize(self, old: Tensor) -> Tensor:
        resized = old.new_zeros((self._num_slots, old.shape[1], self._length, old.shape[3]))
        slots, length = min(old.shape[0], resized.shape[0]), min(old.shape[2], resized.shape[2])
        resized[:slots, :, :length] = old[:slots, :, :length]
        return resized


class PrefillAttention(CausalAttention):
    """Causal attention over prompts, padded on the right, that writes them to the cache.

    Padding writes garbage after each prompt. Decoding overwrites every position before its mask
    includes it.
    """

    def __init__(
        self, cache: SlotKVCache, *, slots: Sequence[Sequence[int]], device: torch.device
    ) -> None:
        """Prepare a prefill.

        Args:
            cache: The cache to use.
            slots: For each row, the slots that its keys and values are written to.
            device: Device of the model.
        """
        self._cache = cache
        self._slots = torch.tensor([slot for chosen in slots for slot in chosen], device=device)
        self._rows = torch.tensor(
            [row for row, chosen in enumerate(slots) for _ in chosen], device=device
        )

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, rule: ScoreRule
    ) -> Tensor:
        """Attend and write the cache; see Attention."""
        self._cache.write(layer, key, value, slots=self._slots, rows=self._rows)
        return CausalAttention.attend(self, layer, query, key, value, rule=rule)


class DecodeAttention:
    """Attention for one new token in each of the first n slots over the cached positions."""

    def __init__(self, cache: SlotKVCache, *, positions: Tensor, longest: int) -> None:
        """Prepare a decoding step.

        Args:
            cache: The cache to use.
            positions: [n] position per new token.
            longest: The largest position, passed separately to avoid a device synchronization.
        """
        self._cache = cache
        self._positions = positions
        self._slots = torch.arange(len(positions), device=positions.device)
        self._length = longest + 1
        self._distance = positions[:, None] - torch.arange(self._length, device=positions.device)
        self._masks: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, rule: ScoreRule
    ) -> Tensor:
        """Write key and value of the new token to the cache, and attend; see Attention."""
        keys, values = self._cache.append(
            layer, key, value, slots=self._slots, positions=self._positions, length=self._length
        )
        if not rule.supports_fused:
            is_hidden = rule.is_hidden(self._distance)[:, None]
            return _attend_scores(query, keys, values, is_hidden=is_hidden, rule=rule)
        rows, heads, _, size = query.shape
        # A key-value head's G query heads become rows of one query, instead of repeating keys and
        # values G times.
        grouped = query.view(rows, keys.shape[1], heads // keys.shape[1], size)
        mask = self._mask(rule, query.dtype)
        output = functional.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=mask, scale=rule.scale
        )
        return output.reshape(rows, heads, 1, values.shape[-1])

    def _mask(self, rule: ScoreRule, dtype: torch.dtype) -> Tensor:
        """Return [n, 1, 1, S]: 0 for visible positions and minus infinity for others.

        Cached, because layers of one kind need the same mask.
        """
        mask = self._masks.get((rule.window, dtype))
        if mask is None:
            is_hidden = rule.is_hidden(self._distance)
            mask = torch.zeros_like(is_hidden, dtype=dtype).masked_fill_(is_hidden, -torch.inf)[
                :, None, None
            ]
            self._masks[rule.window, dtype] = mask
        return mask


def _attend_slots(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    slots: Attention,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Call an Attention as transformers does, and return [rows, L, heads, D]."""
    layer = module.layer_idx
    assert isinstance(layer, int)
    rule = ScoreRule(scale=scaling, window=sliding_window, softcap=softcap, sinks=s_aux)
    output = slots.attend(layer, query, key, value, rule=rule)
    return output.transpose(1, 2), None


AttentionInterface.register(SLOT_ATTENTION, _attend_slots)
