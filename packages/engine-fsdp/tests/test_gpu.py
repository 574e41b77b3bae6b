"""What only a CUDA device can show: variable-length flash attention, bf16, and memory that is really freed. NCCL is tools/gpu's."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.objective import Query
from temper_engine_api.specs import PrecisionSpec, ResidencySpec
from temper_engine_fsdp import attention
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.engine import FSDPEngine
from temper_engine_fsdp.fused_head import linear_logprob

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, such as one H200"),
]


@pytest.fixture
def config(config: FSDPConfig) -> FSDPConfig:
    """The usual one, on CUDA in bf16."""
    return replace(config, device="cuda", precision=PrecisionSpec(compute="bf16"))


def logprobs(engine: FSDPEngine, batch: SequenceBatch) -> Tensor:
    with engine.eval_mode():
        packed = engine.shard_data(batch, max_tokens=64)
        outputs = engine.forward_backward_batch(packed, forward_only=True, outputs=[Query.LOGPROB]).outputs
    assert outputs is not None
    return outputs.in_order_of(batch.sample_ids).columns[Query.LOGPROB]


def test_auto_chooses_the_variable_length_kernel_in_bf16() -> None:
    chosen = attention.choose_kernel("auto", device=torch.device("cuda", 0), compute="bf16")
    assert chosen == attention.TORCH_VARLEN


def test_float32_logprobs_equal_those_of_the_cpu(start: Callable[..., FSDPEngine], batch: SequenceBatch) -> None:
    exact = PrecisionSpec(compute="fp32")
    theirs = logprobs(start(device="cpu", precision=exact), batch)
    torch.testing.assert_close(logprobs(start(precision=exact), batch), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel", ["sdpa_varlen", "torch_varlen"])
def test_bf16_logprobs_are_near_those_of_the_cpu(kernel: str, start: Callable[..., FSDPEngine], batch: SequenceBatch) -> None:
    theirs = logprobs(start(device="cpu", precision=PrecisionSpec(compute="fp32")), batch)
    # bf16 keeps 8 bits: 4e-3 an operation on logits of size 1, a dozen operations deep.
    torch.testing.assert_close(logprobs(start(attention=kernel), batch), theirs, rtol=0.0, atol=5e-2)


def test_the_fused_head_equals_all_logits_at_once() -> None:
    hidden = torch.randn(500, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(3001, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(0, 3001, (500,), device="cuda")
    ours = linear_logprob(hidden, weight, labels, chunk_tokens=130).logprob
    theirs = torch.log_softmax((hidden @ weight.t()).float(), -1).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)
    for a, b in zip(torch.autograd.grad(ours.sum(), (hidden, weight)), torch.autograd.grad(theirs.sum(), (hidden, weight))):
        assert float((a - b).float().norm() / b.float().norm()) < 1e-2


def test_offloading_frees_the_memory_of_the_device(start: Callable[..., FSDPEngine]) -> None:
    here = start()
    with_parameters = torch.cuda.memory_allocated()
    here.close()
    start(residency=ResidencySpec(offload_parameters=True, offload_optimizer=True))
    assert torch.cuda.memory_allocated() < with_parameters
