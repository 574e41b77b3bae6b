"""Layouts and small models whose gradient norms with MegatronEngine are measured on CUDA."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from temper_engine_api.specs import Compute, LoraSpec, Scalar
from temper_engine_megatron.config import Float8Scaling
from tools.gpu.workload import SMALL

LAYOUTS: Mapping[str, Mapping[str, object]] = {
    "single": {},
    "tp2": {"tensor_parallel": 2},
    "tp2-sp": {"tensor_parallel": 2, "sequence_parallel": True},
    "pp2": {"pipeline_parallel": 2},
    "cp2": {"context_parallel": 2},
    "dp2-distopt": {"distributed_optimizer": True},
    "tp2-pp2": {"tensor_parallel": 2, "pipeline_parallel": 2},
    "dp4-distopt": {"distributed_optimizer": True},
    "ep2": {"expert_parallel": 2, "distributed_optimizer": True},
    "ep4": {"expert_parallel": 4, "distributed_optimizer": True},
    "tp2-sp-ep2": {
        "tensor_parallel": 2,
        "sequence_parallel": True,
        "expert_parallel": 2,
        "expert_tensor_parallel": 1,
    },
    "pp2-ep2": {"pipeline_parallel": 2, "expert_parallel": 2},
}
TE: Final = "transformer_engine"
MIXTURE: Mapping[str, Scalar] = {
    **SMALL,
    "model_type": "qwen3_moe",
    "head_dim": 64,
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A small model and dtype whose gradient norms are measured."""

    name: str
    compute: Compute
    architecture: Mapping[str, Scalar] = field(default_factory=lambda: SMALL)
    lora: LoraSpec = field(default_factory=LoraSpec)
    layers: Literal["torch", "transformer_engine"] = "torch"
    float8: Float8Scaling = "none"

    @property
    def has_experts(self) -> bool:
        """True for a mixture of experts."""
        return "num_experts" in self.architecture

    def supports(self, layout: str) -> bool:
        """Return whether this model can run with a layout.

        Expert parallelism needs experts. With experts, tensor parallelism needs sequence
        parallelism. The engine refuses blockwise float8 with sequence parallelism.
        """
        fields = LAYOUTS[layout]
        if self.float8 == "blockwise" and "sequence_parallel" in fields:
            return False
        has_plain_tensor_parallel = (
            "tensor_parallel" in fields and "sequence_parallel" not in fields
        )
        return (
            not has_plain_tensor_parallel if self.has_experts else "expert_parallel" not in fields
        )


CASES = (
    Case(name="fp32", compute="fp32"),
    Case(name="bf16", compute="bf16"),
    Case(name="fp16", compute="fp16"),
    Case(name="LoRA fp32", compute="fp32", lora=LoraSpec(rank=8, alpha=16.0)),
    Case(name="LoRA bf16", compute="bf16", lora=LoraSpec(rank=8, alpha=16.0)),
    Case(name="experts fp32", compute="fp32", architecture=MIXTURE),
    Case(name="experts bf16", compute="bf16", architecture=MIXTURE),
    Case(name="te bf16", compute="bf16", layers=TE),
    Case(name="te tensorwise bf16", compute="bf16", layers=TE, float8="tensorwise"),
    Case(name="te blockwise bf16", compute="bf16", layers=TE, float8="blockwise"),
    Case(name="te LoRA bf16", compute="bf16", layers=TE, lora=LoraSpec(rank=8, alpha=16.0)),
    Case(name="te experts bf16", compute="bf16", layers=TE, architecture=MIXTURE),
)
