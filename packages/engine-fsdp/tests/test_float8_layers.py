"""Test float8 layers: emulated on the CPU, and with the GPU's products where there is one."""

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor, nn

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.errors import CapabilityError, ConfigError
from temper_engine_api.specs import LoraSpec, ModelSpec, PrecisionSpec
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.engine import FSDPEngine
from temper_engine_fsdp.model.float8_layers import convert_to_float8
from temper_engine_fsdp.model.huggingface_model import build_model

needs_torchao = pytest.mark.skipif(
    find_spec("torchao") is None,
    reason="an environment with torchao would run it: pip install './packages/engine-fsdp[float8]'",
)
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(
                not torch.cuda.is_available()
                or torch.cuda.get_device_capability() < (8, 9),  # float8 products
                reason="needs a GPU with float8 products, such as one H100",
            ),
        ],
    ),
]


@pytest.fixture(params=DEVICES)
def config(config: FSDPConfig, request: pytest.FixtureRequest) -> FSDPConfig:
    """Return the usual config in bf16 on each device."""
    return replace(config, device=request.param, precision=PrecisionSpec(compute="bf16"))


def compute_gradient(engine: FSDPEngine, batch: SequenceBatch) -> Tensor:
    """Return the gradient of all parameters as one vector: AdamW's first moment, times ten."""
    engine.set_loss_fn(
        lambda data, predictions, ctx: (-predictions["logprob"][data.loss_mask].mean(), ctx)
    )
    engine.optimizer_zero_grad()
    with engine.train_mode():
        engine.forward_backward_step(batch)
    engine.optimizer_step()
    with engine.export_state() as state:
        return torch.cat([entry.first_moment.float().flatten().cpu() for entry in state]) * 10


@needs_torchao
@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise"])
def test_gradients_are_near_those_of_bf16(
    scaling: str, start: Callable[..., FSDPEngine], batch: SequenceBatch
) -> None:
    # The batch has 53 tokens, so the product for the weight's gradient has to be padded.
    assert len(batch.tokens) % 16
    expected = compute_gradient(start(), batch)
    actual = compute_gradient(start(float8=scaling), batch)
    assert not torch.equal(actual, expected)
    # A float8 number has 4 significant bits: an error of 3 % per operand.
    assert (actual - expected).norm() < 0.15 * expected.norm()


@needs_torchao
def test_only_tensorwise_outputs_depend_on_other_tokens(config: FSDPConfig) -> None:
    device = torch.device(config.device)
    tokens = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    outlier = tokens.clone()
    outlier[16:] *= 1000
    is_equal = {}
    for scaling in ("rowwise", "tensorwise"):
        hf = build_model(config.model, attention="sdpa").to(device, torch.bfloat16)
        convert_to_float8(hf, scaling=scaling, device=device)
        layer: nn.Module = hf.get_submodule("model.layers.0.self_attn.q_proj")
        outputs = [layer(x.to(device, torch.bfloat16))[:16] for x in (tokens, outlier)]
        is_equal[scaling] = torch.equal(*outputs)
    assert is_equal == {"rowwise": True, "tensorwise": False}


@needs_torchao
def test_exported_weights_are_not_rounded_to_float8(start: Callable[..., FSDPEngine]) -> None:
    exported = []
    for engine in (start(), start(float8="rowwise")):
        with engine.export_weights() as weights:
            exported.append({weight.name: weight.tensor.clone() for weight in weights})
    assert exported[0].keys() == exported[1].keys()
    assert all(torch.equal(tensor, exported[1][name]) for name, tensor in exported[0].items())


@needs_torchao
def test_routers_are_not_converted(config: FSDPConfig) -> None:
    # Its router is an `nn.Linear` with 16 outputs, a multiple of the alignment.
    sizes = {"num_local_experts": 16, "num_experts_per_tok": 2, "model_type": "phimoe"}
    hf = build_model(
        ModelSpec(architecture={**config.model.architecture, **sizes}), attention="sdpa"
    )
    router = hf.get_submodule("model.layers.0.mlp.router")
    convert_to_float8(hf, scaling="rowwise", device=torch.device("cpu"))
    assert hf.get_submodule("model.layers.0.mlp.router") is router
    assert type(hf.get_submodule("model.layers.0.self_attn.q_proj")).__name__ == "Float8Linear"


@needs_torchao
def test_model_without_layers_of_suitable_size_is_rejected(
    config: FSDPConfig,
) -> None:
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_key_value_heads": 4}
    model = ModelSpec(architecture={**config.model.architecture, **sizes})
    with pytest.raises(CapabilityError, match="no linear decoder layer whose sizes are multiples"):
        FSDPEngine.check_model(replace(config, model=model, float8="rowwise"))


def test_missing_torchao_is_found_before_the_start(
    config: FSDPConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.delitem(sys.modules, "torchao.float8", raising=False)
    with pytest.raises(ConfigError, match=r"torchao is not installed: run pip install '.*float8"):
        FSDPEngine.check_model(replace(config, float8="rowwise"))


def test_float8_is_rejected_in_float32_and_with_an_adapter(config: FSDPConfig) -> None:
    with pytest.raises(ConfigError, match=r"precision\.compute is fp32: .* set it to bf16"):
        replace(config, float8="rowwise", precision=PrecisionSpec(compute="fp32"))
    with pytest.raises(ConfigError, match="adapters over float8 layers are not supported"):
        replace(config, float8="rowwise", lora=LoraSpec(rank=4, alpha=8.0))
