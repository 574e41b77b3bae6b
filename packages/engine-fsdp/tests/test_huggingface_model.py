"""Test building models from a spec: seeds, strict weights and rejected models."""

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BambaConfig, LlamaConfig, PretrainedConfig

from temper_engine_api.errors import CapabilityError, ConfigError, WeightError
from temper_engine_api.specs import ModelSpec, ModelType, Scalar
from temper_engine_fsdp.components import check_model
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.model.huggingface_model import build_model
from temper_engine_fsdp.model.packed_attention import SDPA_VARLEN, register_kernels
from temper_engine_fsdp.model.token_mixers import read_declared

TINY: Mapping[str, Scalar] = {
    "model_type": "qwen2",
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    build_model(ModelSpec(architecture=TINY), attention="eager").save_pretrained(tmp_path)
    return tmp_path


def test_random_weights_depend_only_on_the_seed() -> None:
    torch.manual_seed(5)
    first = build_model(ModelSpec(architecture=TINY, seed=1), attention="eager")
    torch.manual_seed(6)
    same = build_model(ModelSpec(architecture=TINY, seed=1), attention="eager")
    other = build_model(ModelSpec(architecture=TINY, seed=2), attention="eager")
    assert torch.equal(first.lm_head.weight, same.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_building_a_model_preserves_the_rng_state() -> None:
    torch.manual_seed(5)
    build_model(ModelSpec(architecture=TINY), attention="eager")
    after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(1))


@pytest.mark.parametrize("path", ["no/such/folder", "/no/such/folder", "owner/name-0.5B"])
def test_a_path_that_is_not_a_directory_is_rejected_before_any_download(path: str) -> None:
    with pytest.raises(
        ConfigError, match=f"^model.path is '{path}', which is not a local directory"
    ):
        build_model(ModelSpec(path=path), attention="eager")


def test_a_config_with_an_invalid_setting_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "vocab_size": "320"}')
    with pytest.raises(
        ConfigError, match=r"/config.json has an invalid setting: .*'vocab_size' expected int"
    ):
        build_model(ModelSpec(path=str(tmp_path)), attention="eager")


def test_a_missing_weight_is_named(saved: Path) -> None:
    weights = load_file(saved / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightError, match=r"1 missing, such as model\.norm\.weight\."):
        build_model(ModelSpec(path=str(saved)), attention="eager")


def test_an_unexpected_weight_is_named(saved: Path) -> None:
    weights = load_file(saved / "model.safetensors")
    weights["model.surplus"] = torch.zeros(1)
    save_file(weights, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightError, match=r"1 unexpected, such as model\.surplus\."):
        build_model(ModelSpec(path=str(saved)), attention="eager")


def change_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"intermediate_size": 40},
            r"json: 3 of another shape, such as \S+\.down_proj\.weight \(\[16, 24\] instead of ",
        ),
        (
            {"vocab_size": 32},
            r"2 of another shape, such as lm_head\.weight \(\[31, 16\] inst",
        ),
        ({"tie_word_embeddings": True, "num_hidden_layers": 2}, r"12 missing, such as model\."),
    ],
)
def test_weights_of_another_config_are_refused_in_the_same_words_before_they_are_loaded(
    fields: Mapping[str, object], message: str, saved: Path
) -> None:
    change_config(saved, **fields, layer_types=None)
    spec = ModelSpec(path=str(saved))
    with pytest.raises(WeightError, match=message) as loaded:
        build_model(spec, attention="eager")
    with pytest.raises(WeightError) as checked:
        check_model(FSDPConfig(model=spec))
    assert str(checked.value) == str(loaded.value)


@pytest.mark.parametrize("kind", ["language_model", "value_model"])
def test_check_accepts_weights_that_fit(kind: ModelType, saved: Path) -> None:
    check_model(FSDPConfig(model=ModelSpec(path=str(saved), model_type=kind)))


def test_a_value_head_on_a_language_model_is_new_and_seeded(saved: Path) -> None:
    spec = ModelSpec(path=str(saved), model_type="value_model", seed=4)
    first, again = build_model(spec, attention="eager"), build_model(spec, attention="eager")
    assert first.score.weight.shape == (1, 16)
    assert torch.equal(first.score.weight, again.score.weight)
    language = load_file(saved / "model.safetensors")
    assert torch.equal(first.model.norm.weight, language["model.norm.weight"])


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"model_type": "llama", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "rotary embedding of type dynamic",
        ),
        (
            {"model_type": "lfm2_moe", "layer_types": ["conv"], "num_dense_layers": 1},
            "takes hidden_states and no layout of the pack",
        ),
        ({"model_type": "falcon", "alibi": True}, "has ALiBi"),
        (
            {"model_type": "gptj", "n_embd": 16, "n_head": 2, "n_layer": 1},
            "cannot build a language_model with packed attention from this gptj",
        ),
        (
            {"model_type": "llama4", "text_config": {"num_hidden_layers": 4}},
            "layers of type chunked_attention",
        ),
        (
            {"model_type": "bart", "d_model": 16, "decoder_layers": 1},
            "this bart model takes no position_ids",
        ),
        (
            {"model_type": "bert"},
            r"this bert model has cls\..* between its last hidden state and its output projection",
        ),
        (
            {"model_type": "modernbert-decoder", "decoder_bias": False, "pad_token_id": 0},
            r"has lm_head\..* between its last hidden state",
        ),
        (
            {"model_type": "minimax", "layer_types": ["linear_attention"]},
            "has 1 layers with a state, but only 0 with a convolution",
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_model_that_would_mix_packed_sequences_is_refused(
    fields: dict[str, object], sentence: str
) -> None:
    with pytest.raises(CapabilityError, match=sentence):
        build_model(ModelSpec(architecture={**TINY, **fields}), attention="sdpa")


def test_yarn_without_the_head_dim_that_transformers_reads_is_refused(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    fields = {"model_type": "mixtral", "rope_parameters": {**yarn, "rope_theta": 1e4}}
    with pytest.raises(ConfigError, match=r"model\.architecture: .* yarn .* set head_dim to 8"):
        check_model(FSDPConfig(model=ModelSpec(architecture={**TINY, **fields})))
    (tmp_path / "config.json").write_text(json.dumps({**TINY, **fields}))
    with pytest.raises(ConfigError, match=r"config\.json: .* yarn .* set head_dim to 8"):
        check_model(FSDPConfig(model=ModelSpec(path=str(tmp_path))))


@pytest.mark.parametrize("name", ["window", "sliding_window"])
def test_fields_of_code_outside_transformers_are_read_however_they_are_set(name: str) -> None:
    class OwnConfig(PretrainedConfig):
        attribute_map: ClassVar = {"sliding_window": "window"}

        def __init__(self, **kwargs: object) -> None:
            self.window = kwargs.pop("window", 7)
            super().__init__(**kwargs)

    assert read_declared(OwnConfig(), name) == 7
    assert read_declared(LlamaConfig(window=7), "window") is None
    assert read_declared(BambaConfig(), "layer_types") is not None, "declared in attribute_map"


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_model_with_an_empty_weight_is_refused() -> None:
    fields = {
        "model_type": "glm4_moe",
        "n_routed_experts": 4,
        "moe_intermediate_size": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 0,
        "first_k_dense_replace": 0,
    }
    with pytest.raises(CapabilityError, match=r"shared_experts\.gate_proj\.weight has shape \[0, "):
        build_model(ModelSpec(architecture={**TINY, **fields}), attention="sdpa")


def test_model_that_does_not_declare_a_replaceable_attention_is_refused() -> None:
    register_kernels()
    with pytest.raises(CapabilityError, match="BloomForCausalLM does not declare that it supports"):
        build_model(ModelSpec(architecture={**TINY, "model_type": "bloom"}), attention=SDPA_VARLEN)


def test_state_over_all_tokens_and_sequence_parallelism_are_refused_together() -> None:
    config = FSDPConfig(
        model=ModelSpec(architecture={**TINY, "model_type": "qwen3_next", "num_experts": 0}),
        sequence_parallel=2,
    )
    with pytest.raises(ConfigError, match="sequence_parallel is 2, but this qwen3_next model"):
        check_model(config)


def test_kernel_without_dropout_is_refused_for_a_model_with_dropout() -> None:
    config = FSDPConfig(
        model=ModelSpec(architecture={**TINY, "attention_dropout": 0.1}), attention="torch_varlen"
    )
    with pytest.raises(ConfigError, match="torch_varlen has no dropout, but the model sets it to"):
        check_model(config)


def test_attention_classes_that_are_chosen_by_name_are_refused() -> None:
    register_kernels()
    with pytest.raises(
        CapabilityError,
        match="cannot build a language_model with packed attention from this falcon model",
    ):
        build_model(ModelSpec(architecture={**TINY, "model_type": "falcon"}), attention=SDPA_VARLEN)


@pytest.mark.skipif(find_spec("timm") is not None, reason="needs an environment without timm")
def test_error_names_the_package_that_a_model_needs() -> None:
    register_kernels()
    architecture = {"model_type": "gemma3n", "text_config": {**TINY, "model_type": "gemma3n_text"}}
    with pytest.raises(ConfigError, match=r"this gemma3n model needs: .* timm library"):
        build_model(ModelSpec(architecture=architecture), attention=SDPA_VARLEN)


@pytest.mark.parametrize("model_type", ["olmo", "gemma3_text"])
def test_value_model_without_a_head_for_tokens_is_rejected(model_type: str) -> None:
    with pytest.raises(
        CapabilityError, match=f"transformers has no {model_type} model with a head for tokens"
    ):
        build_model(
            ModelSpec(architecture={**TINY, "model_type": model_type}, model_type="value_model"),
            attention="eager",
        )


def test_an_architecture_with_invalid_fields_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"model\.architecture is not valid for model type bamba"):
        build_model(ModelSpec(architecture={**TINY, "model_type": "bamba"}), attention="eager")


def test_lists_of_an_architecture_reach_the_config() -> None:
    kinds = ("sliding_attention", "full_attention")
    fields = {**TINY, "model_type": "gemma3_text", "num_hidden_layers": 2, "layer_types": kinds}
    model = build_model(ModelSpec(architecture=fields), attention="eager")
    assert model.config.layer_types == list(kinds)


FOREIGN_CONFIG = """
from transformers import Qwen2Config
class ForeignConfig(Qwen2Config):
    model_type = "foreign"
"""
FOREIGN_MODEL = """
from transformers import Qwen2ForCausalLM
from .configuration_foreign import ForeignConfig
class ForeignForCausalLM(Qwen2ForCausalLM):
    config_class = ForeignConfig
"""


@pytest.fixture
def foreign(saved: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a model directory with its own Python files."""
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(saved / "modules")
    )
    (saved / "configuration_foreign.py").write_text(FOREIGN_CONFIG)
    (saved / "modeling_foreign.py").write_text(FOREIGN_MODEL)
    settings = json.loads((saved / "config.json").read_text())
    classes = {
        "AutoConfig": "configuration_foreign.ForeignConfig",
        "AutoModelForCausalLM": "modeling_foreign.ForeignForCausalLM",
    }
    (saved / "config.json").write_text(
        json.dumps({**settings, "model_type": "foreign", "auto_map": classes})
    )
    return saved


def test_code_of_a_model_runs_only_if_trusted(foreign: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"If you trust the Python files in it, set model\.trust_remote_code",
    ):
        build_model(ModelSpec(path=str(foreign)), attention="eager")
    assert (
        type(
            build_model(ModelSpec(path=str(foreign), trust_remote_code=True), attention="eager")
        ).__name__
        == "ForeignForCausalLM"
    )
