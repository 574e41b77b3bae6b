"""Try families of models without TransformerEngine: transformers, PEFT, Megatron-Bridge and -Core.

    python tools/model_components.py > docs/records/model_components.md
    python3.12 tools/model_components.py --table >> docs/records/model_components.md

Each family is a tiny random model of the conformance kit, on the CPU. A cell says what ran, or
gives the first line of the exception. Nothing is compared: that is what the kit does. The last
column is what `tools/vllm_families.py` has recorded.
"""

import importlib.util
import json
import os
import platform
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from temper_engine_api.conformance.inputs.model_families import FAMILIES
from temper_engine_megatron.bridge_compat.bridge_import import import_bridge
from temper_engine_megatron.runtime.cpu_device import support_missing_cuda

OPTIONAL = ("transformer_engine", "fla", "causal_conv1d", "mamba_ssm", "flash_attn")
"""Packages with kernels for these families."""
PACKAGES = ("torch", "transformers", "peft", "megatron-core", "megatron-bridge")
VLLM_RECORD = Path(__file__).resolve().parent.parent / "docs" / "records" / "vllm_families.json"
TITLES = (
    *("family", "transformers", "LoRA with PEFT on all linear layers"),
    *("provider of Megatron-Bridge", "Megatron-Core model with its layers in plain torch"),
    "vLLM's build for CPUs loads the export",
)
INTRODUCTION = """# What runs without TransformerEngine

{about}

```sh
python tools/model_components.py
```

* Vision-language models: [supported models](../models.md#families-checked-against-transformers)
  says what the FSDP engine runs of them, with LoRA of PEFT, and what vLLM loads. The Megatron
  engine refuses them, because it does not run their encoder of images.
* Qwen3.5: Megatron-Bridge 0.3.1 has no provider for its text models. The Megatron engine has a
  bridge of its own, with Qwen3-Next's names.
* The columns of Megatron show what its packages do alone. The Megatron engine replaces layers and
  completes configs, and supports more families. Gradients of its nine
  families are compared [with both pairs](engine_megatron.md#the-newer-pair)."""
"""Text before the tables."""


def main() -> int:
    """Print the table, with the start of the page unless the argument is `--table`."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    if sys.argv[1:] != ["--table"]:
        print(INTRODUCTION.format(about=str(__doc__).strip().split("\n\n")[-1]))
    print(f"\n## Python {platform.python_version()}\n")
    print("; ".join(map(describe_version, PACKAGES)))
    missing = [name for name in OPTIONAL if importlib.util.find_spec(name) is None]
    print(f"\nNot installed: {', '.join(missing)}.\n")
    print(f"| {' | '.join(TITLES)} |\n" + "|---" * len(TITLES) + "|")
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    recorded = json.loads(VLLM_RECORD.read_text())
    for family in FAMILIES:
        if "vision_config" in FAMILIES[family].architecture:
            continue
        attempts = (run_transformers, run_peft, find_provider, build_megatron_model)
        cells = [attempt(run, make_config(family)) for run in attempts]
        error = recorded["families"][family].get("error")
        cells.append(f"no: {error}" if error else f"vllm {recorded['versions']['vllm']}")
        print(f"| {family} | {' | '.join(cells)} |", flush=True)
    dist.destroy_process_group()
    return 0


def describe_version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"{package} not installed"


def make_config(family: str) -> PretrainedConfig:
    """Return the config of the tiny model of a family."""
    model = FAMILIES[family]
    fields: dict[str, object] = {**model.settings, **model.architecture}
    config: PretrainedConfig = AutoConfig.for_model(str(fields.pop("model_type")), **fields)
    config.pad_token_id = None
    return config


def attempt(run: Callable[[PretrainedConfig], str], config: PretrainedConfig) -> str:
    """Return what ran, or the exception in one line."""
    try:
        return run(config)
    except Exception as error:  # noqa: BLE001  # the exception is the result of this cell
        text = " ".join(str(error).split()).replace("|", "/")
        return f"no: {type(error).__name__}: {text[:110]}"


def build_transformers_model(config: PretrainedConfig) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    return model


def run_backward(model: torch.nn.Module) -> None:
    """Run a forward and a backward pass over two sequences of 9 tokens."""
    tokens = torch.arange(18).reshape(2, 9)
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()


def run_transformers(config: PretrainedConfig) -> str:
    """Train one step in transformers' own torch code."""
    run_backward(build_transformers_model(config))
    return "forward and backward"


def run_peft(config: PretrainedConfig) -> str:
    """Train one step of a LoRA adapter on all linear layers."""
    lora = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(build_transformers_model(config), lora)
    run_backward(model)
    kinds = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if hasattr(module, "lora_A")
    }
    return f"backward; {', '.join(sorted(kinds))}"


def make_provider(config: PretrainedConfig) -> Any:
    """Return Megatron-Bridge's provider."""
    config.architectures = [type(build_transformers_model(config)).__name__]
    # The bridge reads fields that transformers 4 had.
    rope = config.to_dict().get("rope_parameters") or {}
    for name, value in (("rope_theta", rope.get("rope_theta")), ("full_attention_interval", 2)):
        if value is not None and not hasattr(config, name):
            setattr(config, name, value)
    return (
        import_bridge().AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    )


def find_provider(config: PretrainedConfig) -> str:
    """Name the provider of a family."""
    return type(make_provider(config)).__name__


def build_megatron_model(config: PretrainedConfig) -> str:
    """Build the provider's model with Megatron-Core's layers in plain torch."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    # Megatron sets these for one model, and refuses them for the next.
    for name in [name for name in os.environ if name.startswith("NVTE_")]:
        del os.environ[name]
    with support_missing_cuda():
        provider = make_provider(config)
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel()
            model_parallel_cuda_manual_seed(1)
        from megatron.bridge.models.gpt_provider import local_layer_spec

        provider.transformer_layer_spec = local_layer_spec
        provider.use_cpu_initialization = True
        for name in ("apply_rope_fusion", "persist_layer_norm", "masked_softmax_fusion"):
            setattr(provider, name, False)
        provider.moe_permute_fusion = provider.moe_grouped_gemm = False
        provider.finalize()
        model = provider.provide(pre_process=True, post_process=True)
    return f"builds {type(model).__name__}; numbers not compared"


if __name__ == "__main__":
    sys.exit(main())
