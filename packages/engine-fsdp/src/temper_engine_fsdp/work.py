"""How much arithmetic a model takes per token, how fast this machine multiplies, and from both the speed of a pass.

The convention: 6 floating-point operations for each weight in a matrix product and token, the head included and the embedding's look-up
not, and 6 x s^2 x heads x head_dim for each layer and sequence of s tokens, which is half of what attention without a mask takes.
Frozen weights count 4, since they get no gradient; recomputation counts nothing, and so does the end of a sliding window.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from transformers import PretrainedConfig, PreTrainedModel

from temper_engine_api.metrics import Metric


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Floating-point operations of a training pass."""

    per_token: float
    """In matrix products."""
    per_square: float
    """In attention, for each squared length of a sequence."""

    def of(self, lengths: Sequence[int]) -> float:
        """Of these sequences."""
        return sum(self.per_token * length + self.per_square * length * length for length in lengths)


def work_of(model: PreTrainedModel, *, is_language_model: bool) -> Work:
    """Counted from a model that is still whole, or without memory."""
    config = model.config
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings() if is_language_model else None
    is_tied = head is not None and head.weight is embedding
    per_token = 0.0
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or (parameter is embedding and not is_tied):
            continue
        share = _active_share(config) if ".experts." in name else 1.0
        per_token += (6.0 if parameter.requires_grad else 4.0) * share * parameter.numel()
    head_dim = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
    return Work(per_token=per_token, per_square=6.0 * config.num_hidden_layers * config.num_attention_heads * head_dim)


def _active_share(config: PretrainedConfig) -> float:
    """Experts that a token sees, of all there are."""
    settings = config.to_dict()
    seen, total = settings.get("num_experts_per_tok"), settings.get("num_experts") or settings.get("num_local_experts")
    return seen / total if isinstance(seen, int) and isinstance(total, int) else 1.0


@cache
def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second of a large matrix product, measured once per process."""
    size, repeats = (8192, 21) if device.type == "cuda" else (256, 5)
    with torch.no_grad():
        # Numbers without a pattern, since a device multiplies zeros and ones faster; and none of the process's random ones.
        a = torch.arange(size * size, device=device, dtype=torch.float32).sin_().view(size, size).to(dtype)
        seconds = []
        for _ in range(repeats):
            begin = _now(device)
            a @ a
            seconds.append(_now(device) - begin)
    return 2.0 * size**3 / sorted(seconds)[repeats // 2]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Speedometer:
    """Speed of the training passes of one rank."""

    def __init__(self, work: Work, *, device: torch.device, compute: torch.dtype, ranks_of_a_pack: int) -> None:
        self.work = work
        self._device = device
        self._compute = compute
        self._share = 1.0 / ranks_of_a_pack
        self._lengths: Sequence[int] | None = None
        self._begun = 0.0

    def begin(self, lengths: Sequence[int] | None) -> None:
        """A training pass over sequences of these lengths begins, or a pass that is not measured."""
        self._lengths, self._begun = lengths, time.perf_counter()

    def metrics(self) -> Mapping[str, Metric]:
        """Of the training pass since ``begin``, which ends now; nothing where there was none. Waits for the device."""
        if self._lengths is None:
            return {}
        seconds = _now(self._device) - self._begun
        lengths, self._lengths = self._lengths, None
        done = self.work.of(lengths) * self._share / matmul_rate(self._device, self._compute)
        return {
            "speed/tokens_per_s": Metric(value=sum(lengths) * self._share, weight=seconds, reduction="mean"),
            "speed/mfu": Metric(value=done, weight=seconds, reduction="mean"),
        }
