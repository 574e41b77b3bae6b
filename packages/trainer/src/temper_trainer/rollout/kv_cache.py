"""A KV cache with one slot per sequence, and attention that reads and writes it.

The first n slots are in use, so a decoding step reads views instead of gathered copies. Models call
this through transformers' attention interface under the name SLOT_ATTENTION. The keyword argument
`slots` of a forward pass is the Attention object for that pass.

Shapes: n slots in use, L query positions, H key-value heads, G query heads per key-value head, S
cached positions, D head size.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from temper_engine_api.errors import CapabilityError

SLOT_ATTENTION = "temper_slots"
_BLOCK = 64
"""Capacity grows in multiples of this many positions."""


class Attention(Protocol):
    """The attention of one forward pass."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Return [rows, H x G, L, D].

        Args:
            layer: Index of the layer.
            query: [rows, H x G, L, D].
            key: [rows, H, L, D].
            value: [rows, H, L, D].
            scale: Factor of the scores.
            window: Size of the sliding window; None for full attention.
        """
        ...


class CausalAttention:
    """Causal attention over full sequences, padded on the right, without a cache."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Attend within each row; see Attention."""
        length = query.shape[2]
        if window is None or length <= window:
            # Fused kernels support is_causal, but an explicit mask only with slower ones.
            return functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scale, enable_gqa=True
            )
        distance = torch.arange(length, device=query.device)[:, None] - torch.arange(
            length, device=query.device
        )
        mask = (distance >= 0) & (distance < window)
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale, enable_gqa=True
        )


class SlotKVCache:
    """Keys and values of every layer, [slots, H, S, D] each, allocated at the first write."""

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
        self._allocate(layer, key)
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
        """Write one position of each of the first n slots; return views [n, H, length, D]."""
        self._allocate(layer, key)
        keys, values = self._keys[layer], self._values[layer]
        keys[slots, :, positions] = key[:, :, 0]
        values[slots, :, positions] = value[:, :, 0]
        return keys[: len(slots), :, :length], values[: len(slots), :, :length]

    def _allocate(self, layer: int, like: Tensor) -> None:
        if self._keys[layer].ndim != 4:
            shape = (self._num_slots, like.shape[1], self._length, like.shape[3])
            # Zeros, not uninitialized memory: a masked position has weight 0, but 0 x NaN is NaN.
            self._keys[layer], self._values[layer] = like.new_zeros(shape), like.new_zeros(shape)

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
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Attend and write the cache; see Attention."""
        self._cache.write(layer, key, value, slots=self._slots, rows=self._rows)
        return CausalAttention.attend(self, layer, query, key, value, scale=scale, window=window)


class DecodeAttention:
    """Attention of one new token in each of the first n slots over the cached positions."""

    def __init__(self, cache: SlotKVCache, *, positions: Tensor, longest: int) -> None:
        """Prepare a decoding step.

        Args:
            cache: The cache to use.
            positions: [n] position of each new token.
            longest: The largest position, passed separately to avoid a device synchronization.
        """
        self._cache = cache
        self._positions = positions
        self._slots = torch.arange(len(positions), device=positions.device)
        self._length = longest + 1
        self._masks: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Write the new position and attend; see Attention."""
        keys, values = self._cache.append(
            layer, key, value, slots=self._slots, positions=self._positions, length=self._length
        )
        rows, heads, _, size = query.shape
        # The G query heads of a key-value head become rows of one query, instead of repeating
        # keys and values G times.
        grouped = query.view(rows, keys.shape[1], heads // keys.shape[1], size)
        mask = self._mask(window, query.dtype)
        output = functional.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=mask, scale=scale
        )
        return output.reshape(rows, heads, 1, size)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return [n, 1, 1, S]: 0 for visible positions and minus infinity for others.

        Cached, because layers of one kind need the same mask.
        """
        mask = self._masks.get((window, dtype))
        if mask is None:
            distance = self._positions[:, None] - torch.arange(
                self._length, device=self._positions.device
            )
            is_hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            mask = torch.zeros_like(is_hidden, dtype=dtype).masked_fill_(is_hidden, -torch.inf)[
                :, None, None
            ]
            self._masks[window, dtype] = mask
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
    if softcap is not None or s_aux is not None:
        raise CapabilityError(
            f"{type(module).__name__} uses attention softcapping or sinks, which the hf sampler "
            "does not support: use rollout=vllm."
        )
    layer = module.layer_idx
    assert isinstance(layer, int)
    output = slots.attend(layer, query, key, value, scale=scaling, window=sliding_window)
    return output.transpose(1, 2), None


AttentionInterface.register(SLOT_ATTENTION, _attend_slots)
