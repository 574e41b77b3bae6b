"""Test which layers have a LoRA adapter in mixtures of experts, and that PEFT loads it."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.conformance.inputs.model_families import FAMILIES
from temper_engine_api.conformance.inputs.tiny_models import QWEN3, with_experts, write_model
from temper_engine_api.errors import ConfigError
from temper_engine_api.objective import HeadOutput
from temper_engine_api.specs import LoraSpec, ModelSpec
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.engine import FSDPEngine

Start = Callable[..., FSDPEngine]
LORA = LoraSpec(rank=2, alpha=4.0)
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
MODELS = {**FAMILIES, "qwen3_moe": with_experts(QWEN3)}
MLP_NAMES = {"gate_proj.weight", "up_proj.weight", "down_proj.weight"}
"""Weights that PEFT loads adapters for, in models where it takes the names for experts'."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def texts(batch: SequenceBatch) -> SequenceBatch:
    return replace(batch, tokens=batch.tokens % 40)


def model_of(family: str, folder: Path) -> ModelSpec:
    return ModelSpec(path=str(write_model(MODELS[family], folder=folder)))


def network_of(model: ModelSpec) -> PreTrainedModel:
    network: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        model.path, dtype=torch.float32, attn_implementation="eager"
    )
    return network


def linears_of(model: ModelSpec) -> set[str]:
    network = network_of(model)
    head = network.get_output_embeddings()
    return {
        name
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }


def logprobs_of(engine: FSDPEngine, batch: SequenceBatch) -> Tensor:
    with engine.eval_mode():
        result = engine.forward_backward_batch(
            engine.shard_data(batch), forward_only=True, outputs=[HeadOutput.LOGPROB]
        )
    return result.outputs.columns[HeadOutput.LOGPROB]


def adapted_by(tensors: dict[str, Tensor]) -> set[str]:
    return {
        name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        for name in tensors
        if name.endswith(".lora_A.weight")
    }


def write_random_adapter(engine: FSDPEngine, folder: Path) -> dict[str, Tensor]:
    """Load random tensors into an engine's adapter, and write its export to a directory."""
    config, tensors = engine.export_adapter()
    generator = torch.Generator().manual_seed(0)
    engine.load_adapter(
        config,
        {
            name: 0.3 * torch.randn(each.shape, generator=generator)
            for name, each in tensors.items()
        },
    )
    config, tensors = engine.export_adapter()
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(dict(config)))
    save_file(dict(tensors), folder / "adapter_model.safetensors", {"format": "pt"})
    return dict(tensors)


@torch.no_grad()
def peft_logprobs(model: ModelSpec, folder: Path, texts: SequenceBatch) -> Tensor:
    """Compute the log-probs of trained tokens in PEFT, one sequence after another."""
    network = PeftModel.from_pretrained(network_of(model), str(folder)).eval()
    columns = []
    for tokens, temperature in zip(
        texts.tokens.split(texts.lengths.tolist()), texts.temperature, strict=True
    ):
        logits = network(input_ids=tokens[None], use_cache=False).logits[0] / temperature
        chosen = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
        columns += [torch.zeros(1), chosen]
    return torch.cat(columns)


def assert_peft_computes_the_same(
    engine: FSDPEngine, *, model: ModelSpec, folder: Path, texts: SequenceBatch
) -> None:
    actual, mask = logprobs_of(engine, texts), texts.loss_mask
    with engine.disable_adapter():
        base = logprobs_of(engine, texts)
    assert (actual - base)[mask].abs().max() > 0.05
    torch.testing.assert_close(
        actual[mask], peft_logprobs(model, folder, texts)[mask], atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("targets", [(), EXPERTS], ids=["linears", "with-experts"])
@pytest.mark.parametrize(
    "family", ["deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_moe", "mixtral"]
)
def test_all_linear_is_every_linear_layer_outside_experts(
    start: Start,
    folder: Path,
    tmp_path: Path,
    texts: SequenceBatch,
    family: str,
    targets: tuple[str, ...],
) -> None:
    model = model_of(family, folder)
    engine = start(model=model, lora=replace(LORA, target_parameters=targets))
    tensors = write_random_adapter(engine, tmp_path / "adapter")
    inside = {name for name in adapted_by(tensors) if ".experts" in name}
    assert adapted_by(tensors) - inside == linears_of(model)
    assert bool(inside) == bool(targets)
    # A layer's experts have rank 2 each; their tensors are the rows of one A.
    assert {len(each) for name, each in tensors.items() if "lora_A" in name} <= {2, 2 * 4}
    config, _ = engine.export_adapter()
    assert not config["rank_pattern"]
    assert_peft_computes_the_same(engine, model=model, folder=tmp_path / "adapter", texts=texts)
    # The exported adapter starts another engine, which exports it as it was.
    again = start(model=model, lora=LoraSpec(path=str(tmp_path / "adapter")))
    assert all(torch.equal(each, tensors[name]) for name, each in again.export_adapter()[1].items())
    assert again.export_adapter()[0]["target_parameters"] == config["target_parameters"]
    torch.testing.assert_close(logprobs_of(again, texts), logprobs_of(engine, texts))


def test_adapters_that_peft_names_by_weights_are_exported_so(start: Start, folder: Path) -> None:
    config, _ = start(model=model_of("deepseek_v3", folder), lora=LORA).export_adapter()
    assert set(config["target_parameters"]) == MLP_NAMES  # type: ignore[call-overload]
    assert "o_proj" in config["target_modules"]  # type: ignore[operator]
    assert not {"gate_proj", "up_proj"} & set(config["target_modules"])  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("family", "targets", "parts"),
    [
        ("deepseek_v3", ("o_proj", "gate_proj", "up_proj", "down_proj"), ("0.mlp", "1.mlp")),
        # One of two projections that PEFT converts only together.
        ("deepseek_v3", ("gate_proj",), ("0.mlp", "1.mlp.shared_experts")),
        ("glm4_moe", r".*\.layers\.0\.mlp\.(gate|up|down)_proj", ("0.mlp",)),
        (
            "glm4_moe",
            r".*\.(o_proj|shared_experts\.(gate|up|down)_proj)",
            ("1.mlp.shared_experts",),
        ),
        # A pattern that selects one of several layers with the same last part.
        ("qwen3_moe", r".*\.layers\.0\.self_attn\.q_proj", ("0.self_attn.q_proj",)),
    ],
)
def test_named_layers_outside_experts_are_adapted(
    start: Start,
    folder: Path,
    tmp_path: Path,
    texts: SequenceBatch,
    family: str,
    targets: str | tuple[str, ...],
    parts: tuple[str, ...],
) -> None:
    model = model_of(family, folder)
    engine = start(model=model, lora=replace(LORA, target_modules=targets))
    tensors = write_random_adapter(engine, tmp_path / "adapter")
    expected = {
        name
        for name in linears_of(model)
        if (
            re.fullmatch(targets, name)
            if isinstance(targets, str)
            else name.rpartition(".")[2] in targets
        )
    }
    assert adapted_by(tensors) == expected
    assert all(any(f".layers.{part}" in name for name in expected) for part in parts)
    assert_peft_computes_the_same(engine, model=model, folder=tmp_path / "adapter", texts=texts)


def test_all_linear_without_what_peft_refuses_works_in_mamba_hybrids(
    config: FSDPConfig, start: Start, folder: Path
) -> None:
    model = model_of("nemotron_h", folder)
    with pytest.raises(ConfigError, match="'out_proj' is incompatible with Mamba-based models"):
        FSDPEngine(replace(config, model=model, lora=LORA)).init_model()
    engine = start(model=model, lora=replace(LORA, exclude_modules=("out_proj",)))
    assert adapted_by(dict(engine.export_adapter()[1])) == {
        name for name in linears_of(model) if not name.endswith("out_proj")
    }


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"dropout": 0.5}, "lora.dropout is 0.5, but in DeepseekV3ForCausalLM PEFT can load"),
        ({"dora": True}, "lora.dora is True, but in DeepseekV3ForCausalLM PEFT can load"),
    ],
)
def test_dropout_and_dora_are_refused_where_peft_has_none(
    config: FSDPConfig, folder: Path, start: Start, fields: dict[str, object], sentence: str
) -> None:
    model, lora = model_of("deepseek_v3", folder), replace(LORA, **fields)  # type: ignore[arg-type]
    refused = replace(config, model=model, lora=lora)
    with pytest.raises(ConfigError, match=sentence):
        FSDPEngine.check_model(refused)
    with pytest.raises(ConfigError, match=sentence):
        FSDPEngine(refused).init_model()
    start(model=model, lora=replace(lora, exclude_modules=("gate_proj", "up_proj", "down_proj")))


def test_name_that_only_matrices_inside_experts_have_is_refused_with_where_to_name_them(
    config: FSDPConfig, folder: Path
) -> None:
    lora = replace(LORA, target_modules=("q_proj", "gate_proj"))
    with pytest.raises(
        ConfigError, match=r"names gate_proj, but no layer .* in lora.target_parameters: mlp\.exp"
    ):
        FSDPEngine.check_model(replace(config, model=model_of("qwen3_moe", folder), lora=lora))


def test_saved_adapter_that_peft_would_put_on_experts_is_refused(
    config: FSDPConfig, start: Start, folder: Path, tmp_path: Path
) -> None:
    model = model_of("deepseek_v3", folder)
    write_random_adapter(start(model=model, lora=LORA), tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    fields = json.loads(file.read_text())
    names = [*fields["target_modules"], "gate_proj", "up_proj", "down_proj"]
    file.write_text(json.dumps({**fields, "target_modules": names, "target_parameters": None}))
    with pytest.raises(ConfigError, match="PEFT applies some to the experts of DeepseekV3"):
        FSDPEngine(replace(config, model=model, lora=LoraSpec(path=str(file.parent)))).init_model()
