"""Adapters as PEFT itself writes them.

What was trained next to the low-rank halves comes along, or the adapter is refused.
"""

import json
from pathlib import Path

import pytest
import torch
from old_files import write_fsdp
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.other import get_pattern_key
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

from temper_legacy_shim.checkpoints import Options, Sources, convert, plan_jobs
from temper_legacy_shim.checkpoints.adapters import matching
from temper_legacy_shim.checkpoints.files.dist_ckpt import DistCheckpoint
from temper_legacy_shim.checkpoints.files.lazy import as_torch
from temper_legacy_shim.errors import DamagedFileError, LayoutError, ShimError, UsageError

TOKENS = torch.arange(12)[None]
TARGETS = ["q_proj", "down_proj"]
KINDS: dict[str, dict[str, object]] = {
    "modules-to-save": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "biases-of-adapted": {"bias": "lora_only"},
    "biases-of-all": {"bias": "all"},
    "an-embedding": {"target_modules": [*TARGETS, "embed_tokens"]},
    "patterns": {
        "alpha_pattern": {r"layers\.0\..*q_proj": 32, "layers.1.mlp.down_proj": 3},
        "rank_pattern": {"down_proj": 3},
    },
}


TIED: dict[str, dict[str, object]] = {
    "an-adapter-of-the-head": {"target_modules": [*TARGETS, "lm_head"]},
    "an-adapter-of-the-embedding": {"target_modules": [*TARGETS, "embed_tokens"]},
    "neither": {},
}


def _base(*, is_tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 50,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return LlamaForCausalLM(
        LlamaConfig(**sizes, attention_bias=True, tie_word_embeddings=is_tied)
    ).eval()


def _exported(folder: Path, *, is_tied: bool = False, **settings: object) -> torch.Tensor:
    """Write a base and an adapter around it; the logits of both together."""
    _base(is_tied=is_tied).save_pretrained(folder / "base")
    made = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS, "task_type": "CAUSAL_LM"} | settings
    model = get_peft_model(_base(is_tied=is_tied), LoraConfig(**made)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter) * parameter.requires_grad
        model.save_pretrained(
            folder / "adapter", save_embedding_layers="embed_tokens" in made["target_modules"]
        )
        logits: torch.Tensor = model(TOKENS).logits
    return logits


def _convert(folder: Path, target: str) -> Path:
    job = plan_jobs(folder / "adapter", folder / target)[0]
    convert(job, Options(target=target, checks_names=False), Sources(base_model=folder / "base"))  # type: ignore[arg-type]
    return folder / target


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_trained_next_to_an_exported_adapter_comes_along(
    tmp_path: Path, kind: str
) -> None:
    expected = _exported(tmp_path, **KINDS[kind])
    merged = LlamaForCausalLM.from_pretrained(_convert(tmp_path, "hf"), dtype=torch.float32).eval()
    base = LlamaForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    apart = PeftModel.from_pretrained(base, _convert(tmp_path, "peft")).eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(TOKENS).logits, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(apart(TOKENS).logits, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [{"lora_bias": True, "target_modules": ["q_proj"]}, {"trainable_token_indices": [3]}],
    ids=["biases-of-its-own", "single-tokens"],
)
@pytest.mark.parametrize("target", ["hf", "peft"])
@pytest.mark.filterwarnings("ignore:Adapter 'default'")  # which takes these biases for shards
def test_an_adapter_of_more_than_two_halves_is_refused(
    tmp_path: Path, settings: dict[str, object], target: str
) -> None:
    _exported(tmp_path, **settings)
    with pytest.raises(LayoutError, match="no plain LoRA"):
        _convert(tmp_path, target)


@pytest.mark.parametrize("kind", TIED)
@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's own merge can't do it, and says so
def test_an_adapter_of_one_of_two_tied_tables_leaves_the_other_as_it_was(
    tmp_path: Path, kind: str
) -> None:
    expected = _exported(tmp_path, is_tied=True, **TIED[kind])
    merged = LlamaForCausalLM.from_pretrained(_convert(tmp_path, "hf"), dtype=torch.float32).eval()
    assert merged.config.tie_word_embeddings is (kind == "neither")
    with torch.no_grad():
        torch.testing.assert_close(merged(TOKENS).logits, expected, rtol=0, atol=1e-5)


def test_an_adapter_of_transposed_weights_is_not_added_to_them(tmp_path: Path) -> None:
    _exported(tmp_path)
    path = tmp_path / "adapter/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"fan_in_fan_out": True}))
    with pytest.raises(ShimError, match="fan_in_fan_out"):
        _convert(tmp_path, "hf")


# Nightly: both models keep weights transposed in the same layer class.
@pytest.mark.parametrize(
    "model_type", ["gpt2", pytest.param("openai-gpt", marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize(
    "targets",
    [
        # Nightly: the others also have two of these targets.
        pytest.param(["c_proj", "c_fc"], id="two", marks=pytest.mark.nightly),
        pytest.param(["attn.c_proj"], id="square"),
        pytest.param(["c_attn", "lm_head"], id="with-the-head"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT corrects fan_in_fan_out and says so
def test_an_adapter_of_weights_that_are_kept_transposed_is_added_to_them(
    tmp_path: Path, model_type: str, targets: list[str]
) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type,
        n_embd=16,
        n_layer=2,
        n_head=2,
        vocab_size=50,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    base = AutoModelForCausalLM.from_config(config)
    base.save_pretrained(tmp_path / "base")
    made = LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")
    model = get_peft_model(base, made).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter) * parameter.requires_grad
        expected = model(TOKENS).logits
    write_fsdp(
        tmp_path / "actor", {name: tensor.detach() for name, tensor in model.state_dict().items()}
    )
    config.save_pretrained(tmp_path / "actor/huggingface")

    def converted(target: str) -> Path:
        job = plan_jobs(tmp_path / "actor", tmp_path / target)[0]
        convert(job, Options(target=target), Sources(lora_alpha=8))  # type: ignore[arg-type]
        return tmp_path / target

    merged = AutoModelForCausalLM.from_pretrained(converted("hf"), dtype=torch.float32).eval()
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    apart = PeftModel.from_pretrained(base, converted("peft")).eval()
    with torch.no_grad():
        torch.testing.assert_close(apart(TOKENS).logits, expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(merged(TOKENS).logits, expected, rtol=0, atol=1e-5)
    required = model.merge_and_unload().state_dict()
    assert all(
        torch.allclose(tensor, required[name], rtol=0, atol=1e-6)
        for name, tensor in merged.state_dict().items()
    )


@pytest.mark.parametrize(
    "targets", [TARGETS, "all-linear"], ids=["below-the-head", "of-the-head-too"]
)
def test_a_critic_s_adapter_is_resumed_with_the_old_head(tmp_path: Path, targets: object) -> None:
    sizes = {
        "vocab_size": 50,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = LlamaConfig(**sizes, num_labels=1)
    made = LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)  # type: ignore[arg-type]
    model = get_peft_model(AutoModelForTokenClassification.from_config(config), made)
    write_fsdp(
        tmp_path / "critic", {name: tensor.detach() for name, tensor in model.state_dict().items()}
    )
    config.save_pretrained(tmp_path / "critic/huggingface")
    receipt = convert(
        plan_jobs(tmp_path / "critic", tmp_path / "out")[0],
        Options(target="temper"),
        Sources(lora_alpha=8),
    )
    assert receipt.head == "value_model"
    assert not any(
        "converted or" in note for note in receipt.notes
    )  # which would add the adapter twice
    halves = {
        name.replace(".default", "")
        for name in model.state_dict()
        if ".lora_" in name and "score" not in name
    }
    result = DistCheckpoint(tmp_path / "out/step_00000000/engine/dcp").tensors
    head = {f"base_model.model.score.{part}" for part in ("weight", "bias")}
    # Without old moments, the optimizer begins with moments of 0.
    kinds = ("parameter", "first_moment", "second_moment", "update_count")
    assert result.keys() == {f"{kind}.{name}" for kind in kinds for name in halves | head}
    full = model.merge_and_unload().state_dict()
    for part in ("weight", "bias"):
        torch.testing.assert_close(
            as_torch(result[f"parameter.base_model.model.score.{part}"]), full[f"score.{part}"]
        )


def test_another_base_for_an_adapter_that_has_its_own_is_an_error(tmp_path: Path) -> None:
    _exported(tmp_path)
    for path in (tmp_path / "base").iterdir():
        path.rename(tmp_path / "adapter" / path.name)
    _base().save_pretrained(tmp_path / "base")
    with pytest.raises(UsageError, match="--base-model has no effect"):
        _convert(tmp_path, "hf")


def test_an_adapter_in_torch_s_own_file_is_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    _exported(tmp_path)
    file = tmp_path / "adapter/adapter_model.safetensors"
    torch.save(load_file(file), file.with_suffix(".bin"))
    expected = load_file(file)
    file.unlink()
    written = load_file(_convert(tmp_path, "peft") / "adapter_model.safetensors")
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())


PATTERNS = [
    "q_proj",
    "self_attn.q_proj",
    r"layers\.0\..*q_proj",
    "^model.layers.0.self_attn.q_proj",
    r".*\.1\..*",
    "layers.(0|2).mlp",
    "v_proj$",
]


@pytest.mark.parametrize(
    "module",
    [
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.mlp",
        "model.layers.2.mlp",
        "q_proj",
        "my_q_proj",
        "v_proj",
    ],
)
def test_patterns_are_matched_as_peft_matches_them(module: str) -> None:
    for pattern in PATTERNS:
        assert (matching([pattern], module, source="it") or module) == get_pattern_key(
            [pattern], module
        ), pattern
    assert (matching(PATTERNS, module, source="it") or module) == get_pattern_key(PATTERNS, module)


@pytest.mark.parametrize("pattern", ["(a+)+b", "(?=.*a.*)a", ".*.*.*.*b", r"(.)\1+", "(?:a*){9}"])
def test_a_pattern_that_may_take_for_ever_is_refused(pattern: str) -> None:
    with pytest.raises(LayoutError, match="for ever"):
        matching([pattern], "a" * 40, source="it")


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(DamagedFileError, match="no regular expression"):
        matching(["layers.(0"], "a", source="it")
