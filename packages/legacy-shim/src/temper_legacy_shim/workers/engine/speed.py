"""Compute the fraction of a device's peak speed, logged as ``perf/mfu``.

Facts of the count and of the peaks: verl's ``utils/flops_counter.py`` of January 2026; dense
matrices, forward and backward, attention at half its square.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from transformers import AutoConfig

from temper_engine_api.engine import BaseEngine

_DENSE = frozenset({"llama", "mimo", "mistral", "qwen2", "qwen3", "seed_oss"})
_EXPERTS = frozenset({"qwen2_moe", "qwen3_moe"})
_PEAKS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "MI300X": 1336e12,
    "H100": 989e12,
    "H800": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362.05e12,
    "L40": 181.05e12,
    "A40": 149.7e12,
    "L20": 119.5e12,
    "H20": 148e12,
}
"""Operations per second in 16 bits by device name; longer names come first."""
_CPU_PEAK = 448e9


def compute_mfu(
    engine: BaseEngine, *, lengths: object, passes: int, elapsed_s: float
) -> float | None:
    """Compute ``perf/mfu`` of one call over all ranks.

    0 if architecture or device is not in the tables.

    Args:
        engine: that was trained.
        lengths: ``meta_info["global_token_num"]``, tokens of each sequence over all ranks; None if
            the batch does not say it.
        passes: over the batch.
        elapsed_s: of the call.
    """
    if not isinstance(lengths, Sequence):
        return None
    fields = _fields_of(engine)
    done = operations(fields, [int(length) for length in lengths]) * passes / elapsed_s
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return done / peak(device) / engine.topology.world_size


def operations(fields: Mapping[str, object], lengths: Sequence[int]) -> float:
    """Count a forward and backward pass's operations; 0 for an unknown model."""
    kind = fields["model_type"]
    if kind not in _DENSE | _EXPERTS:
        return 0.0
    hidden, layers, heads = (
        _number(fields, name)
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    )
    width = _number(fields, "head_dim") if fields.get("head_dim") else hidden // heads
    attention = hidden * width * 2 * (heads + _number(fields, "num_key_value_heads"))
    if kind in _DENSE:
        mixing = hidden * _number(fields, "intermediate_size") * 3
    else:
        mixing = hidden * (
            _number(fields, "num_experts_per_tok") * _number(fields, "moe_intermediate_size") * 3
        )
        mixing += hidden * _number(fields, "num_experts")
    weights = (mixing + attention) * layers + 2 * _number(fields, "vocab_size") * hidden
    return (
        6.0 * weights * sum(lengths)
        + 6.0 * sum(length**2 for length in lengths) * width * heads * layers
    )


def peak(device_name: str) -> float:
    """Return a device's operations per second; infinite if unknown, so that mfu is 0."""
    if device_name == "cpu":
        return _CPU_PEAK
    return next((value for name, value in _PEAKS.items() if name in device_name), math.inf)


def _fields_of(engine: BaseEngine) -> Mapping[str, object]:
    model = engine.config.model
    return (
        dict(model.architecture)
        if model.path is None
        else _fields_in(model.path, model.trust_remote_code)
    )


@lru_cache
def _fields_in(path: str, trust_remote_code: bool) -> Mapping[str, object]:
    fields: Mapping[str, object] = AutoConfig.from_pretrained(
        path, trust_remote_code=trust_remote_code
    ).to_dict()
    return fields


def _number(fields: Mapping[str, object], name: str) -> int:
    value = fields[name]
    assert isinstance(value, int)
    return value
