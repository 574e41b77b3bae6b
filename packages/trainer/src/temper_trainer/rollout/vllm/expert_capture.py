"""The experts that vLLM's routers choose, for routing replay; runs inside vLLM's workers."""

from collections.abc import Callable

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

Capture = Callable[[int, Tensor], None]
"""Takes the index of a layer and the [tokens, K] experts that it chose."""


def find_expert_layers(model: torch.nn.Module) -> list[int]:
    """Return the sorted indices of the layers with experts; vLLM reports zeros for the others."""
    return sorted(module.layer_id for module in model.modules() if isinstance(module, MoERunner))


def capture_experts_on_cpu() -> None:
    """Let vLLM's CPU build report the chosen experts. Idempotent; does nothing on a GPU.

    vLLM 0.27.1 refuses `enable_return_routed_experts` there, because the method that computes the
    experts also chooses them, and does not report its choice. vLLM 0.32 refuses it as well, because
    only its second model runner reports experts. That runner needs Triton, which has no CPU
    backend.
    """
    if current_platform.is_cpu() and hasattr(GPUModelRunner, "_bind_routed_experts_capturer"):
        GPUModelRunner._bind_routed_experts_capturer = _bind_capturer


def _bind_capturer(runner: GPUModelRunner, capturer: object) -> None:
    """Replace the method of the same name, which connects the layers with their recorder."""
    for module in runner.model.modules():
        if isinstance(module, MoERunner):
            _observe(module, capture=capturer.capture)  # type: ignore[attr-defined]


def _observe(module: MoERunner, *, capture: Capture) -> None:
    # Imported here, because later versions of vLLM do not have it.
    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import select_experts

    method, layer_id = module.routed_experts.quant_method, module.layer_id
    apply: Callable[..., Tensor] = method.apply_monolithic

    def run(
        layer: torch.nn.Module, x: Tensor, router_logits: Tensor, input_ids: Tensor | None = None
    ) -> Tensor:
        # Choose again: the same function with the same arguments makes the same choice.
        _, experts = select_experts(
            hidden_states=x,
            router_logits=router_logits,
            top_k=layer.top_k,
            use_grouped_topk=layer.use_grouped_topk,
            renormalize=layer.renormalize,
            topk_group=layer.topk_group,
            num_expert_group=layer.num_expert_group,
            custom_routing_function=layer.custom_routing_function,
            scoring_func=layer.scoring_func,
            routed_scaling_factor=layer.routed_scaling_factor,
            e_score_correction_bias=layer.e_score_correction_bias,
        )
        capture(layer_id, experts)
        return apply(layer, x, router_logits, input_ids)

    method.apply_monolithic = run
