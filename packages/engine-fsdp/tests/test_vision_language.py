"""Text parts of vision-language models: the encoder of images is frozen, sharded and exported."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.conformance.inputs.model_families import FAMILIES
from temper_engine_api.conformance.inputs.tiny_models import write_model
from temper_engine_api.errors import CapabilityError
from temper_engine_api.hooks import Context
from temper_engine_api.objective import HeadOutput
from temper_engine_api.specs import LoraSpec, ModelSpec
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.engine import FSDPEngine

Start = Callable[..., FSDPEngine]
ENCODER = "model.visual."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = write_model(FAMILIES["qwen3_vl"], folder=tmp_path_factory.mktemp("models"))
    (target / "preprocessor_config.json").write_text("{}")
    return target


@pytest.fixture
def model(folder: Path) -> ModelSpec:
    return ModelSpec(path=str(folder))


@pytest.fixture
def texts(batch: SequenceBatch) -> SequenceBatch:
    return replace(batch, tokens=batch.tokens % 40)


def mean_nll(
    data: SequenceBatch, predictions: Mapping[str, Tensor], ctx: Context
) -> tuple[Tensor, Context]:
    return -predictions["logprob"][data.loss_mask].mean(), ctx


def update(engine: FSDPEngine, texts: SequenceBatch) -> dict[str, Tensor]:
    """Accumulate two calls, update, and return the exported weights."""
    engine.set_loss_fn(mean_nll)
    engine.optimizer_zero_grad()
    with engine.train_mode():
        for _ in range(2):
            engine.forward_backward_step(texts, {}, forward_only=False)
    assert engine.optimizer_step() > 0
    with engine.export_weights() as stream:
        return {name: tensor.clone() for name, tensor in stream}


@pytest.mark.parametrize(
    "changes",
    [{"strategy": "fsdp1"}, {"wrap_together": 3}, {"activation_checkpointing": True}],
    ids=str,
)
def test_update_trains_the_text_part_and_keeps_the_encoder(
    changes: Mapping[str, object],
    start: Start,
    texts: SequenceBatch,
    model: ModelSpec,
    folder: Path,
) -> None:
    exported = update(start(model=model, **changes), texts)
    original = load_file(folder / "model.safetensors")
    assert exported.keys() == original.keys()
    for name, tensor in exported.items():
        assert torch.equal(tensor, original[name]) == name.startswith(ENCODER), name


def test_update_of_gemma3_keeps_the_encoder_and_its_projection(
    start: Start, texts: SequenceBatch, tmp_path: Path
) -> None:
    saved = write_model(FAMILIES["gemma3"], folder=tmp_path)
    exported = update(start(model=ModelSpec(path=str(saved))), texts)
    original = load_file(saved / "model.safetensors")
    assert exported.keys() == original.keys()
    kept = {name for name, tensor in exported.items() if torch.equal(tensor, original[name])}
    encoder = ("vision_tower.", "multi_modal_projector.")
    assert kept == {name for name in original if name.startswith(encoder)}
    # Google's files have one more part in these names, and no head on the encoder.
    published = shutil.copytree(saved, tmp_path / "published")
    save_file(
        {
            name.replace("vision_tower.", "vision_tower.vision_model."): tensor
            for name, tensor in original.items()
        },
        published / "model.safetensors",
        {"format": "pt"},
    )
    with start(model=ModelSpec(path=str(published))).export_weights() as stream:
        loaded = dict(stream)
    assert loaded.keys() == original.keys()
    assert all(torch.equal(tensor, original[name]) for name, tensor in loaded.items())


def test_training_state_has_no_encoder(start: Start, model: ModelSpec) -> None:
    with start(model=model).export_state() as states:
        assert not [state.name for state in states if state.name.startswith(ENCODER)]


@pytest.mark.parametrize("excluded", [("o_proj",), "(?i).*O_PROJ"], ids=str)
def test_new_adapter_leaves_the_encoder_out(
    excluded: str | tuple[str, ...], start: Start, texts: SequenceBatch, model: ModelSpec
) -> None:
    lora = LoraSpec(rank=2, alpha=4, target_modules="all-linear", exclude_modules=excluded)
    engine = start(model=model, lora=lora)
    update(engine, texts)
    names = engine.export_adapter()[1]
    assert any("q_proj" in name for name in names)
    assert not [name for name in names if "visual" in name or "o_proj" in name]


def test_saved_pattern_of_excluded_modules_has_the_same_order_in_each_run(
    start: Start, model: ModelSpec
) -> None:
    excluded = ("up_proj", "o_proj", "k_proj", "gate_proj", "down_proj")
    lora = LoraSpec(rank=2, alpha=4, target_modules="all-linear", exclude_modules=excluded)
    config = start(model=model, lora=lora).export_adapter()[0]
    suffixes = "down_proj|gate_proj|k_proj|o_proj|up_proj"
    assert config["exclude_modules"] == rf"(?:.*\.)?(?:{suffixes})|(?:model\.visual)\..*"


def test_checkpoint_has_encoder_and_image_processor(
    start: Start, texts: SequenceBatch, model: ModelSpec, tmp_path: Path
) -> None:
    engine = start(model=model, save_huggingface_weights=True)
    exported = update(engine, texts)
    engine.save_checkpoint(str(tmp_path), global_step=1)
    saved = next(tmp_path.rglob("preprocessor_config.json")).parent
    weights = load_file(saved / "model.safetensors")
    assert weights.keys() == exported.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in exported.items())
    again = FSDPEngine(replace(engine.config, model=ModelSpec(path=str(saved))))
    again.init_model()
    with again.eval_mode():
        result = again.forward_backward_step(texts, {}, forward_only=True)
    again.close()
    with engine.eval_mode():
        expected = engine.forward_backward_step(texts, {}, forward_only=True)
    assert result[0] is not None
    assert expected[0] is not None
    logprob = HeadOutput.LOGPROB
    torch.testing.assert_close(result[0][logprob], expected[0][logprob])


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_value_model_of_a_vision_language_model_is_refused(
    family: str, config: FSDPConfig, tmp_path: Path
) -> None:
    folder = write_model(FAMILIES[family], folder=tmp_path)
    value = replace(config, model=ModelSpec(path=str(folder), model_type="value_model"))
    with pytest.raises(CapabilityError, match=f"no {family} model with a head for tokens"):
        FSDPEngine.check_model(value)


def test_experts_with_rows_and_columns_exchanged_give_the_same_model(
    start: Start, tmp_path: Path
) -> None:
    # The files that Qwen published have [experts, in, out]; transformers saves [experts, out, in].
    saved = write_model(FAMILIES["qwen3_vl_moe"], folder=tmp_path)
    published = shutil.copytree(saved, tmp_path / "published")
    weights = load_file(saved / "model.safetensors")
    experts = [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]
    assert len(experts) == 2 * FAMILIES["qwen3_vl_moe"].settings["num_hidden_layers"]
    exchanged = {name: weights[name].transpose(1, 2).contiguous() for name in experts}
    save_file({**weights, **exchanged}, published / "model.safetensors", {"format": "pt"})
    with start(model=ModelSpec(path=str(published))).export_weights() as stream:
        exported = {name: tensor.clone() for name, tensor in stream}
    assert exported.keys() == weights.keys()
    for name in experts:
        assert torch.equal(exported[name], weights[name]), name
