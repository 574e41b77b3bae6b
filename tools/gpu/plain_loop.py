"""A hand-written training loop for one architecture, to compare FSDPEngine with.

FSDP2 over decoder layers that keep their parameters gathered, packed sequences through torch's
variable-length attention, a chunked cross-entropy that computes its gradient in the forward pass,
and fused AdamW. Computes no log-probs per token, no entropy and no objective.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.modeling_utils import AttentionInterface

from temper_engine_api.batch import PackedBatch

KERNEL = "plain_varlen"
"""Name of the attention kernel; transformers knows no mask function for it and builds no mask."""


class _Pack:
    """The current micro-batch, which every attention layer reads."""

    starts: Tensor
    longest: int
    bounds: list[int]


_PACK = _Pack()


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **_: object
) -> tuple[Tensor, None]:
    q, k, v = (x[0].transpose(0, 1).to(torch.bfloat16).contiguous() for x in (query, key, value))
    starts, longest = _PACK.starts, _PACK.longest
    attended = varlen_attn(q, k, v, starts, starts, longest, longest, window_size=(-1, 0))
    assert isinstance(attended, Tensor)
    return attended[None], None


def _attend_on_cpu(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **_: object
) -> tuple[Tensor, None]:
    q, k = query.to(value.dtype), key.to(value.dtype)
    spans = [slice(first, last) for first, last in pairwise(_PACK.bounds)]
    parts = [
        scaled_dot_product_attention(
            q[:, :, x], k[:, :, x], value[:, :, x], is_causal=True, enable_gqa=True
        )
        for x in spans
    ]
    return torch.cat(parts, dim=2).transpose(1, 2), None


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, chunk):  # type: ignore[no-untyped-def]
        loss = torch.zeros((), device=hidden.device)
        grad_hidden, grad_weight = (
            torch.empty_like(hidden),
            torch.zeros_like(weight, dtype=torch.float32),
        )
        for first in range(0, hidden.shape[0], chunk):
            rows = slice(first, first + chunk)
            logits = (hidden[rows] @ weight.t()).float()
            normalizer = torch.logsumexp(logits, -1)
            loss += (normalizer - logits.gather(1, labels[rows, None])[:, 0]).sum()
            # From here on `p` is the gradient with respect to the logits: probabilities minus
            # one-hot.
            p = torch.exp(logits - normalizer[:, None])
            p.scatter_add_(1, labels[rows, None], p.new_full((p.shape[0], 1), -1.0))
            low = p.to(hidden.dtype)
            grad_hidden[rows] = low @ weight
            grad_weight += low.t() @ hidden[rows]
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            grad_hidden * grad.to(grad_hidden.dtype),
            (grad_weight * grad).to(torch.bfloat16),
            None,
            None,
        )


class PlainLoop:
    """One rank of the loop; needs a default process group.

    Args:
        config: Architecture; the weights are random.
        device: `cuda` or `cpu`.
        is_compiled: Compile each decoder layer.
        recomputes: Recompute each decoder layer in the backward pass.
        reshards: Free gathered parameters of a layer after its forward pass.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        device: str,
        is_compiled: bool,
        recomputes: bool = False,
        reshards: bool = False,
    ) -> None:
        self._device = device
        # transformers looks attention kernels up by name.
        AttentionInterface.register(KERNEL, _attend if device == "cuda" else _attend_on_cpu)
        config.use_cache = False
        with torch.device(device):
            self.model = AutoModelForCausalLM.from_config(
                config, attn_implementation=KERNEL, dtype=torch.float32
            )
        self.model.train()
        if recomputes:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        layers = self.model.model.layers
        if is_compiled:
            for layer in layers:
                layer.forward = torch.compile(layer.forward)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in layers:
            fully_shard(layer, mp_policy=policy, reshard_after_forward=reshards)
        fully_shard(self.model.model, mp_policy=policy, reshard_after_forward=False)
        self.parameters = [p for name, p in self.model.named_parameters() if "lm_head" not in name]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-5, fused=True)
        # FSDP shards the tied head with the embedding, and its parameters are not gathered in the
        # loss. The loop therefore trains with a separate head.
        size = (config.vocab_size, config.hidden_size)
        self.head = (
            torch.randn(size, device=device, dtype=torch.bfloat16).mul_(0.02).requires_grad_()
        )

    def update(self, batch: PackedBatch) -> float:
        """Run one update over these micro-batches and return the gradient norm."""
        micro_batches = list(batch.iterate_micro_batches())
        # Gradients accumulate locally and are reduced in the last backward pass only.
        for i, micro in enumerate(micro_batches):
            self.model.model.set_requires_gradient_sync(i == len(micro_batches) - 1)
            _PACK.starts, _PACK.longest = (
                self._to_device(micro.sequence_starts),
                int(micro.lengths.max()),
            )
            _PACK.bounds = micro.sequence_starts.tolist()
            ids, positions = (
                self._to_device(micro.tokens),
                self._to_device(micro.get_position_ids()),
            )
            hidden = self.model.model(
                input_ids=ids[None], position_ids=positions[None]
            ).last_hidden_state[0]
            labels = torch.roll(ids, -1)
            loss: Tensor = _CrossEntropy.apply(hidden.to(torch.bfloat16), self.head, labels, 2048)  # type: ignore[no-untyped-call]
            (loss / batch.denominators.tokens).backward()
        self.head.grad = None
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(norm.full_tensor())  # type: ignore[attr-defined]

    def _to_device(self, tensor: Tensor) -> Tensor:
        return (
            tensor.pin_memory().to("cuda", non_blocking=True) if self._device == "cuda" else tensor
        )
