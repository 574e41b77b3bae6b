"""Keys and values of the sequences that are being decoded, one slot each, and the attention over them.

The first n slots are those in use, so that a decoding step reads views. Models reach this through transformers' attention
interface under the name SLOT_ATTENTION: the keyword argument ``slots`` of a forward pass says what attention means in it.

Shapes: n slots in use, L query positions, H key-value heads, G query heads per key-value head, S remembered positions, D head size.
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
"""Positions are added in multiples of this."""


class Attention(Protocol):
    """What attention means in one forward pass."""

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
        """[rows, H x G, L, D] for query [rows, H x G, L, D], key and value [rows, H, L, D]."""
        ...


class CausalAttention:
    """Whole sequences, padded on the right, nothing remembered."""

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
        """See Attention."""
        length = query.shape[2]
        if window is None or length <= window:
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
    """Keys and values of every layer, [slots, H, S, D] each, allocated at the first write and grown in blocks."""

    def __init__(self, *, num_layers: int) -> None:
        self._keys: list[Tensor] = [torch.empty(0)] * num_layers
        self._values: list[Tensor] = [torch.empty(0)] * num_layers
        self._num_slots = 0
        self._length = 0

    def reserve(self, *, num_slots: int, length: int, max_length: int) -> None:
        """Have room for this many slots and positions: half as many positions again when it must grow, but never above max_length.

        Slots beyond ``num_slots`` are given back when the memory is made anew.
        """
        if num_slots <= self._num_slots and length <= self._length:
            return
        if length > self._length:
            wanted = min(max_length, max(length, self._length + self._length // 2))
            self._length = -(-wanted // _BLOCK) * _BLOCK
        self._num_slots = num_slots
        for layer, (keys, values) in enumerate(zip(self._keys, self._values, strict=True)):
            if keys.ndim == 4:
                self._keys[layer] = self._resized(keys)
                self._values[layer] = self._resized(values)

    def move(self, *, source: int, target: int) -> None:
        """Make slot ``target`` what slot ``source`` is."""
        for tensors in (self._keys, self._values):
            for tensor in tensors:
                if tensor.ndim == 4:
                    tensor[target] = tensor[source]

    def write(self, layer: int, key: Tensor, value: Tensor, *, slots: Tensor, rows: Tensor) -> None:
        """Remember key[rows[i]] and value[rows[i]], each [H, L, D], as the first L positions of slot slots[i]."""
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
        """Remember one position of each of the first n slots; what they remember up to ``length``, as views [n, H, length, D]."""
        self._allocate(layer, key)
        keys, values = self._keys[layer], self._values[layer]
        keys[slots, :, positions] = key[:, :, 0]
        values[slots, :, positions] = value[:, :, 0]
        return keys[: len(slots), :, :length], values[: len(slots), :, :length]

    def _allocate(self, layer: int, like: Tensor) -> None:
        if self._keys[layer].ndim != 4:
            shape = (self._num_slots, like.shape[1], self._length, like.shape[3])
            # Zeros, not garbage: a masked position has weight 0, but 0 x NaN is NaN.
            self._keys[layer], self._values[layer] = like.new_zeros(shape), like.new_zeros(shape)

    def _resized(self, old: Tensor) -> Tensor:
        resized = old.new_zeros((self._num_slots, old.shape[1], self._length, old.shape[3]))
        slots, length = min(old.shape[0], resized.shape[0]), min(old.shape[2], resized.shape[2])
        resized[:slots, :, :length] = old[:slots, :, :length]
        return resized


class PrefillAttention(CausalAttention):
    """Prompts, padded on the right, remembered in one or more slots each.

    What the padding leaves behind a prompt is overwritten, position by position, before a mask lets it be seen.
    """

    def __init__(
        self, memory: SlotKVCache, *, slots: Sequence[Sequence[int]], device: torch.device
    ) -> None:
        """``slots[row]`` are those that the row's keys and values go to."""
        self._memory = memory
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
        """See Attention."""
        self._memory.write(layer, key, value, slots=self._slots, rows=self._rows)
        return CausalAttention.attend(self, layer, query, key, value, scale=scale, window=window)


class DecodeAttention:
    """One new position for each of the first n slots, over all that they remember."""

    def __init__(self, memory: SlotKVCache, *, positions: Tensor, longest: int) -> None:
        """``positions`` [n] are those of the new tokens; ``longest`` is the largest."""
        self._memory = memory
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
        """See Attention. Query heads that share a key-value head become its query rows, so that nothing is repeated."""
        keys, values = self._memory.append(
            layer, key, value, slots=self._slots, positions=self._positions, length=self._length
        )
        rows, heads, _, size = query.shape
        grouped = query.view(rows, keys.shape[1], heads // keys.shape[1], size)
        mask = self._mask(window, query.dtype)
        found = functional.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=mask, scale=scale
        )
        return found.reshape(rows, heads, 1, size)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[n, 1, 1, S]: 0 where a position is seen, else minus infinity; one per forward pass and kind of layer."""
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
    """The attention function that transformers calls, in its words; [rows, L, heads, D] is what it wants back."""
    if softcap is not None or s_aux is not None:
        raise CapabilityError(
            f"{type(module).__name__} caps its attention scores or has attention sinks, which the hf sampler does not do: "
            "use a model without them."
        )
    layer = module.layer_idx
    assert isinstance(layer, int)
    found = slots.attend(layer, query, key, value, scale=scaling, window=sliding_window)
    return found.transpose(1, 2), None


AttentionInterface.register(SLOT_ATTENTION, _attend_slots)
