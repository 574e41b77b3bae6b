"""Test LoRA on one rank: targets, rejected settings and checkpoints.

The conformance kit tests the contract.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.errors import CapabilityError, CheckpointError, ConfigError, WeightError
from temper_engine_api.hooks import Context
from temper_engine_api.specs import LoraSpec, ModelSpec
from temper_engine_api.weights import NamedWeight
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.engine import FSDPEngine

Start = Callable[..., FSDPEngine]
LORA = LoraSpec(rank=2, alpha=4.0)
LINEARS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def mean_nll(
    data: SequenceBatch, predictions: Mapping[str, Tensor], ctx: Context
) -> tuple[Tensor, Context]:
    return -predictions["logprob"][data.loss_mask].mean(), ctx


def train(engine: FSDPEngine, batch: SequenceBatch, *, num_updates: int) -> list[float]:
    engine.set_loss_fn(mean_nll)
    losses = []
    for _ in range(num_updates):
        engine.optimizer_zero_grad()
        with engine.train_mode():
            _, loss, _ = engine.forward_backward_step(batch, {})
        engine.optimizer_step()
        losses.append(float(loss))  # type: ignore[arg-type]
    return losses


def weights_of(engine: FSDPEngine) -> dict[str, Tensor]:
    with engine.export_weights() as stream:
        return dict(stream)


def adapted(engine: FSDPEngine) -> set[str]:
    _, tensors = engine.export_adapter()
    return {name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors if ".lora_" in name}


def test_all_linear_is_every_layer_but_the_head(start: Start) -> None:
    engine = start(lora=LORA)
    config, tensors = engine.export_adapter()
    assert set(config["target_modules"]) == adapted(engine) == LINEARS  # type: ignore[call-overload]
    # 2 layers of 7 projections with 2 factors each.
    assert len(tensors) == 28
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


def test_new_adapter_has_the_initial_values_of_peft(start: Start, config: FSDPConfig) -> None:
    # As MegatronEngine's does, so that both train alike from the first update.
    _, tensors = start(lora=replace(LORA, target_modules=("q_proj", "o_proj"))).export_adapter()
    fields = dict(config.model.architecture)
    network = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(fields.pop("model_type"), **fields)
    )
    torch.manual_seed(config.model.seed)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj", "o_proj"]), network)
    expected = {
        f"base_model.model.{name.replace('.default.', '.')}": p
        for name, p in network.named_parameters()
        if ".lora_" in name
    }
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


def test_targets_are_selected_by_name_and_pattern_and_excluded(start: Start) -> None:
    assert adapted(start(lora=replace(LORA, target_modules=("q_proj", "v_proj")))) == {
        "q_proj",
        "v_proj",
    }
    assert adapted(start(lora=replace(LORA, target_modules=r".*\.mlp\.(up|down)_proj"))) == {
        "up_proj",
        "down_proj",
    }
    assert adapted(
        start(lora=replace(LORA, exclude_modules=("o_proj", "down_proj")))
    ) == LINEARS - {"o_proj", "down_proj"}


def test_only_the_adapter_has_moments_and_a_gradient(start: Start, batch: SequenceBatch) -> None:
    engine = start(lora=LORA)
    losses = train(engine, batch, num_updates=6)
    assert losses[-1] < losses[0] - 0.1
    names = {state.name for state in engine.export_state()}
    assert names == set(engine.export_adapter()[1])


def test_a_language_head_may_be_fully_trained(
    start: Start, config: FSDPConfig, batch: SequenceBatch
) -> None:
    model = ModelSpec(architecture={**config.model.architecture, "tie_word_embeddings": False})
    engine = start(model=model, lora=replace(LORA, modules_to_save=("lm_head",)))
    before = weights_of(engine)["lm_head.weight"]
    train(engine, batch, num_updates=1)
    assert "base_model.model.lm_head.weight" in engine.export_adapter()[1]
    assert not weights_of(engine)["lm_head.weight"].equal(before)
    with engine.disable_adapter():
        assert weights_of(engine)["lm_head.weight"].equal(before)


def test_new_adapter_depends_only_on_the_seed(start: Start) -> None:
    first = start(lora=LORA).export_adapter()[1]
    torch.manual_seed(99)
    second = start(lora=LORA).export_adapter()[1]
    assert all(first[name].equal(second[name]) for name in first)


@pytest.mark.parametrize(
    ("lora", "sentence"),
    [
        (
            replace(LORA, target_modules=("no_such",)),
            r"lora.target_modules names no_such, but no layer of this model has that name",
        ),
        (
            replace(LORA, target_modules=("q_proj", "nope")),
            r"lora.target_modules names nope, but no layer of this model has that name",
        ),
        (
            replace(LORA, exclude_modules=("o_proj", "nope")),
            r"lora.exclude_modules names nope, but no layer of this model has that name",
        ),
        (
            replace(LORA, exclude_modules="nope.*"),
            r"lora.exclude_modules names nope\.\*, but no layer of this model has that name",
        ),
        (
            replace(LORA, target_modules="nope.*"),
            r"lora.target_modules 'nope\.\*' cannot be adapted in Qwen2ForCausalLM",
        ),
        (
            replace(LORA, target_modules=("embed_tokens",)),
            r"matches model.embed_tokens, which cannot be adapted",
        ),
        (
            replace(LORA, modules_to_save=("no_such",)),
            r"lora.modules_to_save names no_such, but no layer of this model has that name",
        ),
        (
            replace(LORA, modules_to_save=("lm_head",)),
            r"lora.modules_to_save names .*, which this model ties",
        ),
        (
            LoraSpec(path="no/such/folder"),
            r"lora.path is 'no/such/folder', which has no adapter_config.json",
        ),
    ],
)
def test_what_cannot_be_adapted_is_refused_also_before_the_run(
    start: Start, config: FSDPConfig, lora: LoraSpec, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        start(lora=lora)
    with pytest.raises(ConfigError, match=sentence):
        FSDPEngine.check_model(replace(config, lora=lora))
    if lora.path is None:
        with pytest.raises(ConfigError, match=sentence):
            FSDPEngine.check_model(replace(config, lora=replace(lora, dora=True)))


def test_fully_trained_modules_and_dora_pass_the_check(config: FSDPConfig) -> None:
    untied = {**config.model.architecture, "tie_word_embeddings": False}
    for model, lora in (
        (config.model, replace(LORA, dora=True)),
        (ModelSpec(architecture=untied), replace(LORA, modules_to_save=("lm_head",))),
        (ModelSpec(architecture=untied, model_type="value_model"), LORA),
    ):
        FSDPEngine.check_model(replace(config, model=model, lora=lora))


def test_another_kind_of_adapter_is_refused(start: Start, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3"}))
    with pytest.raises(CapabilityError, match="has type IA3, but only LORA is supported"):
        start(lora=LoraSpec(path=str(tmp_path)))


def test_a_directory_without_all_its_tensors_is_refused(start: Start, tmp_path: Path) -> None:
    description, tensors = start(lora=LORA).export_adapter()
    (tmp_path / "adapter_config.json").write_text(json.dumps(description))
    with pytest.raises(WeightError, match=r"has no adapter_model\.safetensors"):
        start(lora=LoraSpec(path=str(tmp_path)))
    first, *others = tensors
    save_file({name: tensors[name] for name in others}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(WeightError, match=f"missing {first}"):
        start(lora=LoraSpec(path=str(tmp_path)))


def test_replaced_base_weights_are_part_of_the_checkpoint(
    start: Start, batch: SequenceBatch, tmp_path: Path
) -> None:
    engine = start(lora=LORA)
    with engine.disable_adapter():
        base = weights_of(engine)
    engine.load_weights(NamedWeight(name, tensor + 0.01) for name, tensor in base.items())
    train(engine, batch, num_updates=1)
    step = engine.save_checkpoint(str(tmp_path), global_step=1)
    other = start(lora=LORA)
    other.load_checkpoint(step)
    want = weights_of(engine)
    assert all(tensor.equal(want[name]) for name, tensor in weights_of(other).items())


def test_a_checkpoint_without_the_base_is_refused_where_the_base_was_replaced(
    start: Start, tmp_path: Path
) -> None:
    step = start(lora=LORA).save_checkpoint(str(tmp_path), global_step=1)
    engine = start(lora=LORA)
    with engine.disable_adapter():
        base = weights_of(engine)
    engine.load_weights(NamedWeight(name, tensor + 0.01) for name, tensor in base.items())
    with pytest.raises(CheckpointError, match="load the checkpoint in a new engine"):
        engine.load_checkpoint(step)


def test_a_checkpoint_of_the_full_model_is_not_one_of_an_adapter(
    start: Start, tmp_path: Path
) -> None:
    step = start().save_checkpoint(str(tmp_path), global_step=1)
    with pytest.raises(CheckpointError, match="another model or optimizer"):
        start(lora=LORA).load_checkpoint(step)
