"""Test that names and parts of tensors in files are those that transformers writes and reads."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from temper_engine_api.file_names import FilePart
from temper_engine_api.specs import Scalar
from temper_engine_fsdp.model.weight_names import read_file_names

SIZES: Mapping[str, Scalar] = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "tie_word_embeddings": False,
}
FAMILIES: Mapping[str, Mapping[str, Scalar]] = {
    "qwen2": {},
    "qwen3_moe": {"num_experts": 4},
    # Names of its own: block_sparse_moe, w1, w2 and w3.
    "mixtral": {"num_local_experts": 4},
    # Experts are joined in files, too.
    "gpt_oss": {"num_local_experts": 4},
    "glm4_moe": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    # A single expert, and fewer rows than a probe has.
    "olmoe": {"num_experts": 1, "num_experts_per_tok": 1, "intermediate_size": 3},
    # The prefix of all names differs.
    "nemotron_h": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1},
}


def build(name: str) -> PreTrainedModel:
    config = AutoConfig.for_model(name, **{**SIZES, **FAMILIES[name]})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_parts_equal_the_file_that_transformers_writes(name: str, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    names = read_file_names(model)
    names.check_known()
    parts = {
        part_name: part
        for name, tensor in model.state_dict().items()
        for part_name, part in names.split(name, tensor)
    }
    assert parts.keys() == written.keys()
    assert all(part.equal(written[name]) for name, part in parts.items())


def test_names_are_the_same_for_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = build("mixtral")
    (first, *_), shape = (
        read_file_names(model).list_shapes("model.layers.0.mlp.experts.gate_up_proj", (4, 96, 32)),
        torch.Size((48, 32)),
    )
    assert first == ("model.layers.0.block_sparse_moe.experts.0.w1.weight", shape)


def test_tensor_that_files_have_joined_stays_joined() -> None:
    joined = "model.layers.0.mlp.experts.gate_up_proj"
    names = read_file_names(build("qwen3_moe"), files=[joined])
    assert names.list_shapes(joined, (4, 48, 32)) == [(joined, torch.Size((4, 48, 32)))]
    other = joined.replace("gate_up_proj", "down_proj")
    assert len(names.list_shapes(other, (4, 32, 24))) == 4


def test_parts_are_views_so_that_a_write_reaches_the_model() -> None:
    full = torch.zeros(2, 4, 3)
    FilePart(name="up", expert=1, chunk=1, num_chunks=2).take(full).fill_(1.0)
    assert full.nonzero()[:, :2].unique(dim=0).tolist() == [[1, 2], [1, 3]]
