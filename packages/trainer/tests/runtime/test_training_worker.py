"""Test a role that is colocated with sleeping servers on one GPU."""

import pytest
import torch

from temper_engine_api.specs import ModelSpec
from temper_engine_fsdp.config import FSDPConfig
from temper_trainer.runtime.worker_group import InlineWorkerGroup

ARCHITECTURE = {
    "model_type": "qwen2",
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, such as one H200")
def test_released_cache_is_available_to_another_process() -> None:
    group = InlineWorkerGroup(
        "actor",
        engine_name="fsdp",
        config=FSDPConfig(model=ModelSpec(architecture=ARCHITECTURE), device="cuda"),
    )
    group.init()
    large = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    del large
    free, _ = torch.cuda.mem_get_info()
    group.release_cache()
    assert torch.cuda.mem_get_info()[0] >= free + (1 << 30)
    group.close()
