"""Convert genuine old checkpoints, and compare them bit for bit with gathered weights."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from temper_legacy_shim.checkpoints.conversion import convert
from temper_legacy_shim.checkpoints.model import Sources
from temper_legacy_shim.checkpoints.plan import Options, plan_jobs
from temper_legacy_shim.checkpoints.receipt import check_files, read_receipt
from temper_legacy_shim.errors import UsageError

SAMPLES = (
    "RECONSTRUCTED_v0.4.0_megatron-perrank-tp2-TEnames",
    "RECONSTRUCTED_v0.7.1-torch2.8_fsdp2-actor-untied_ws2_cuda-locations",
    "v0.2_fsdp1-actor-tied_ws1",
    "v0.2_fsdp1-actor-tied_ws2",
    "v0.3.0.post1_fsdp1-actor-untied_ws2",
    "v0.3.0.post1_fsdp1-hsdp-actor-untied_ws4",
    "v0.3.0.post1_megatron-perrank-tp2",
    "v0.4.0_fsdp1-actor-tied_ws2",
    "v0.4.0_megatron-perrank-tp1-untied",
    "v0.4.0_megatron-perrank-tp2",
    "v0.4.1_fsdp1-actor-tied_ws1",
    "v0.4.1_fsdp1-actor-tied_ws2",
    "v0.4.1_fsdp1-actor-tied_ws4",
    "v0.4.1_fsdp1-critic_ws2",
    "v0.4.1_fsdp1-lora_ws2",
    "v0.4.1_fsdp2-actor-untied_ws1",
    "v0.4.1_fsdp2-actor-untied_ws2",
    "v0.4.1_fsdp2-hsdp-actor-untied_ws4",
    "v0.4.1_megatron-distckpt-tp2",
    "v0.5.0_fsdp2-actor-untied-hfmodel_ws2",
    "v0.5.0_fsdp2-critictrl_ws2",
    "v0.5.0_fsdp2-lora_ws2",
    "v0.6.1_fsdp1-actor-tied_ws2",
    "v0.6.1_fsdp2-actor-untied_ws4",
    "v0.6.1_fsdp2-sft-untied_ws2",
    "v0.7.1-torch2.8_fsdp1-critic_ws2",
    "v0.7.1_fsdp1-actor-tied_ws1",
    "v0.7.1_fsdp1-actor-tied_ws2",
    "v0.7.1_fsdp1-critic_ws2",
    "v0.7.1_fsdp1-dsv3-buffer-bf16_ws2",
    "v0.7.1_fsdp1-lora_ws2",
    "v0.7.1_fsdp2-actor-tied-modelonly_ws2",
    "v0.7.1_fsdp2-actor-untied_ws1",
    "v0.7.1_fsdp2-actor-untied_ws2",
    "v0.7.1_fsdp2-actor-untied_ws4",
    "v0.7.1_fsdp2-hsdp-actor-untied_ws4",
    "v0.7.1_megatron-distckpt-tp1",
    "v0.7.1_megatron-distckpt-tp2",
    "v0.7.1_megatron-peft4063-tp1",
    "v0.8.0_fsdp1-actor-tied_ws2",
    "v0.8.0_fsdp2-critic_ws2",
    "v0.9.1_fsdp2-loraonly_ws2",
)
LOW_RANK = tuple(name for name in SAMPLES if "lora" in name or "peft" in name)
ADAPTER_ONLY = ("v0.7.1_megatron-peft4063-tp1", "v0.9.1_fsdp2-loraonly_ws2")
SOURCES_OF_CONFIG = {  # what a user of these has to give, for the old version wrote no config
    "v0.3.0.post1_fsdp1-actor-untied_ws2",
    "v0.3.0.post1_fsdp1-hsdp-actor-untied_ws4",
    "v0.3.0.post1_megatron-perrank-tp2",
}
ALPHAS = {"v0.7.1_megatron-peft4063-tp1": 16.0}
LOGIT_TOLERANCE = 2e-5
"""float32 logits of about 1 to 4, computed by other versions of torch and transformers than the
golden ones.
"""


def _sources(samples: Path, name: str) -> Sources:
    base = samples / "_base" / json.loads((samples / name / "META.json").read_text())["base"]
    return Sources(
        hf_config=base if name in SOURCES_OF_CONFIG else None,
        base_model=base if name in ADAPTER_ONLY else None,
        lora_alpha=ALPHAS.get(name),
    )


def _converted(samples: Path, name: str, out: Path, **options: object) -> Path:
    (job,) = plan_jobs(samples / name / "checkpoints", out)
    convert(job, Options(checks_names=False, **options), _sources(samples, name))  # type: ignore[arg-type]
    return out


def _assert_same_bits(have: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    assert have.keys() == want.keys()
    different = [
        name
        for name in want
        if not torch.equal(have[name].view(torch.uint8), want[name].view(torch.uint8))
    ]
    assert different == []


@pytest.mark.parametrize("name", SAMPLES)
def test_converted_weights_are_the_golden_ones_bit_for_bit_and_give_the_golden_logits(
    samples: Path, name: str, tmp_path: Path
) -> None:
    out = _converted(samples, name, tmp_path / "out")
    golden = load_file(
        samples
        / name
        / (
            "golden_lora_merged.safetensors"
            if name in LOW_RANK
            else "golden_full_state.safetensors"
        )
    )
    have = load_file(out / "model.safetensors")
    if name.endswith(
        "TEnames"
    ):  # the sample's files were cut to bfloat16, its golden weights were not
        golden = {key: tensor.to(torch.bfloat16) for key, tensor in golden.items()}
    _assert_same_bits(
        have, {key.removeprefix("pretrained_model."): tensor for key, tensor in golden.items()}
    )
    assert check_files(out, read_receipt(out).files) == len(have)
    if not name.endswith("TEnames"):
        _assert_golden_logits(
            out, load_file(samples / name / "golden_io.safetensors"), is_trl="critictrl" in name
        )


@torch.no_grad()
def _assert_golden_logits(out: Path, golden: Mapping[str, Tensor], *, is_trl: bool) -> None:
    config = json.loads((out / "config.json").read_text())
    auto = getattr(
        transformers,
        "AutoModelForTokenClassification"
        if "values" in golden and not is_trl
        else "AutoModelForCausalLM",
    )
    model, report = auto.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"], config
    if is_trl:
        hidden = model.eval()(
            input_ids=golden["input_ids"], output_hidden_states=True
        ).hidden_states[-1]
        head = load_file(out / "model.safetensors")
        answer = torch.nn.functional.linear(
            hidden, head["v_head.summary.weight"], head["v_head.summary.bias"]
        ).squeeze(-1)
        assert set(report["unexpected_keys"]) == {"v_head.summary.weight", "v_head.summary.bias"}
    else:
        assert not report["unexpected_keys"]
        answer = model.eval()(input_ids=golden["input_ids"]).logits
    key = next(
        key
        for key in ("logits_after_merge", "mcore_forward_logits", "values", "logits")
        if key in golden
    )
    torch.testing.assert_close(
        answer, golden[key].reshape(answer.shape), atol=LOGIT_TOLERANCE, rtol=LOGIT_TOLERANCE
    )


@pytest.mark.parametrize("name", LOW_RANK)
def test_an_adapter_written_for_peft_gives_the_golden_logits_on_its_base(
    samples: Path, name: str, tmp_path: Path
) -> None:
    from peft import PeftModel

    out = _converted(samples, name, tmp_path / "out", target="peft")
    base = samples / "_base" / json.loads((samples / name / "META.json").read_text())["base"]
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if name not in ADAPTER_ONLY:  # the base inside the checkpoint is the one that was trained on
        kept = _converted(samples, name, tmp_path / "kept", keeps_adapter=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(kept, dtype=torch.float32)
        assert (
            load_file(kept / "adapter/adapter_model.safetensors").keys()
            == load_file(out / "adapter_model.safetensors").keys()
        )
    adapted = PeftModel.from_pretrained(model, str(out))
    golden = load_file(samples / name / "golden_io.safetensors")
    with torch.no_grad():
        logits = adapted.eval()(input_ids=golden["input_ids"]).logits
    key = "mcore_forward_logits" if "mcore_forward_logits" in golden else "logits"
    torch.testing.assert_close(logits, golden[key], atol=LOGIT_TOLERANCE, rtol=LOGIT_TOLERANCE)
    _assert_adapter_is_golden(
        load_file(out / "adapter_model.safetensors"),
        load_file(samples / name / "golden_full_state.safetensors"),
    )


def _assert_adapter_is_golden(have: Mapping[str, Tensor], golden: Mapping[str, Tensor]) -> None:
    want = {
        key.replace(".default.", "."): tensor for key, tensor in golden.items() if ".lora_" in key
    }
    if want:
        _assert_same_bits(have, want)


@pytest.mark.parametrize("name", ["v0.7.1_megatron-peft4063-tp1"])
def test_an_alpha_that_no_file_says_is_requested(samples: Path, name: str, tmp_path: Path) -> None:
    (job,) = plan_jobs(samples / name / "checkpoints", tmp_path / "out")
    sources = Sources(base_model=_sources(samples, name).base_model)
    with pytest.raises(UsageError, match="--lora-alpha"):
        convert(job, Options(), sources)
    assert list(tmp_path.iterdir()) == []


def test_a_config_that_no_file_holds_is_requested(samples: Path, tmp_path: Path) -> None:
    (job,) = plan_jobs(
        samples / "v0.3.0.post1_fsdp1-actor-untied_ws2/checkpoints", tmp_path / "out"
    )
    with pytest.raises(UsageError, match="--hf-config"):
        convert(job, Options(), Sources())
    assert list(tmp_path.iterdir()) == []
