"""Tests on a GPU, for what a CPU cannot show."""

import time
from collections.abc import Callable

import pytest
import torch

from temper_engine_api.specs import ModelSpec, OptimizerSpec
from temper_engine_megatron.config import MegatronConfig
from temper_engine_megatron.engine import MegatronEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def engine() -> MegatronEngine:
    architecture = {
        "model_type": "qwen2",
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = MegatronConfig(
        model=ModelSpec(architecture=architecture), optimizer=OptimizerSpec(lr=1e-2)
    )
    engine = MegatronEngine(config)
    engine.init_model()
    return engine


def seconds_of(call: Callable[[], None]) -> float:
    started = time.monotonic()
    call()
    return time.monotonic() - started


def test_offloading_does_not_wait_for_kernels_that_are_still_running(
    engine: MegatronEngine,
) -> None:
    matrix = torch.randn(8192, 8192, device="cuda")
    # Allocates pinned memory and loads the kernels.
    engine.to("cpu")
    engine.to("device")
    torch.cuda.synchronize()

    def run_kernels() -> None:
        for _ in range(100):
            torch.mm(matrix, matrix)

    def run_kernels_and_wait() -> None:
        run_kernels()
        torch.cuda.synchronize()

    run_kernels_and_wait()
    kernels_s = seconds_of(run_kernels_and_wait)
    run_kernels()
    offload_s = seconds_of(lambda: engine.to("cpu"))
    torch.cuda.synchronize()
    engine.to("device")
    engine.close()
    assert offload_s < kernels_s / 2, f"offloading took {offload_s} s, the kernels {kernels_s} s"
