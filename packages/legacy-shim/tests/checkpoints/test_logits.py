"""``--verify-logits`` of critics with a v_head, which transformers knows no class for."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from old_files import write_fsdp
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from temper_legacy_shim.checkpoints import (
    Options,
    Sources,
    convert,
    find_roles,
    plan_jobs,
    read_model,
)
from temper_legacy_shim.checkpoints.huggingface.logits import check_logits
from temper_legacy_shim.checkpoints.plan import plan_conversion
from temper_legacy_shim.errors import VerificationError

OPTIONS = Options(checks_names=False, verifies_logits=True)


def write_critic(folder: Path, head: Mapping[str, Tensor]) -> None:
    """Write a critic of two ranks with the names of trl's value models."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    config.tie_word_embeddings = False
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    write_fsdp(
        folder,
        {
            **{f"pretrained_model.{name}": tensor for name, tensor in model.state_dict().items()},
            **head,
        },
    )
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder / "huggingface")


@pytest.fixture
def head() -> dict[str, Tensor]:
    return {
        "v_head.summary.weight": torch.linspace(-1e-3, 1e-3, 16)[None],
        "v_head.summary.bias": torch.tensor([1e-3]),
    }


def test_trunk_and_v_head_are_compared(tmp_path: Path, head: dict[str, Tensor]) -> None:
    write_critic(tmp_path / "critic", head)
    (job,) = plan_jobs(tmp_path / "critic", tmp_path / "out")
    assert any(
        "logits and values of 16 random tokens" in sentence
        for sentence in convert(job, OPTIONS, Sources()).verified
    )


@pytest.mark.parametrize("name", ["v_head.summary.weight", "v_head.summary.bias"])
def test_another_v_head_is_noticed_however_small_its_values_are(
    tmp_path: Path, head: dict[str, Tensor], name: str
) -> None:
    write_critic(tmp_path / "critic", head)
    (job,) = plan_jobs(tmp_path / "critic", tmp_path / "out")
    convert(job, Options(checks_names=False), Sources())
    write_critic(tmp_path / "other/critic", {**head, name: head[name] * 1.1})
    (other,) = find_roles(tmp_path / "other/critic")
    with pytest.raises(VerificationError, match=r"values of .* differ from the source's"):
        check_logits(tmp_path / "out", plan_conversion(read_model(other, Sources()), OPTIONS))
