"""Test what needs a CUDA device: flash attention, bf16, and freed device memory.

tools/gpu tests NCCL.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.conformance.inputs.probes import SftProbe
from temper_engine_api.objective import HeadOutput, HeadOutputs
from temper_engine_api.specs import OffloadSpec, OptimizerSpec, PrecisionSpec
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.engine import FSDPEngine
from temper_engine_fsdp.model import packed_attention
from temper_engine_fsdp.model.liger_kernels import check_kernels, load_kernels
from temper_engine_fsdp.model.token_logprobs import chunked_logprobs
from temper_engine_fsdp.training.sharded_optimizer import ShardedAdamW

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device, such as one H200"
    ),
]


@pytest.fixture
def config(config: FSDPConfig) -> FSDPConfig:
    """Return the usual config on CUDA in bf16."""
    return replace(config, device="cuda", precision=PrecisionSpec(compute="bf16"))


def logprobs(engine: FSDPEngine, batch: SequenceBatch) -> Tensor:
    with engine.eval_mode():
        packed = engine.shard_data(batch, max_tokens=64)
        outputs = engine.forward_backward_batch(
            packed, forward_only=True, outputs=[HeadOutput.LOGPROB]
        ).outputs
    assert outputs is not None
    return outputs.reorder(batch.sample_ids).columns[HeadOutput.LOGPROB]


def test_auto_chooses_the_variable_length_kernel_in_bf16() -> None:
    chosen = packed_attention.choose_kernel(
        "auto", device=torch.device("cuda", 0), compute="bf16", dropout=0.0
    )
    assert chosen == packed_attention.TORCH_VARLEN


def test_model_with_dropout_trains_in_bf16(
    start: Callable[..., FSDPEngine], config: FSDPConfig, batch: SequenceBatch
) -> None:
    architecture = {**config.model.architecture, "attention_dropout": 0.5}
    model = replace(config.model, architecture=architecture)
    assert norms(start(model=model), batch, count=1) != norms(start(), batch, count=1)


def test_float32_logprobs_equal_those_of_the_cpu(
    start: Callable[..., FSDPEngine], batch: SequenceBatch
) -> None:
    exact = PrecisionSpec(compute="fp32")
    on_cpu = logprobs(start(device="cpu", precision=exact), batch)
    torch.testing.assert_close(
        logprobs(start(precision=exact), batch), on_cpu, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("kernel", ["sdpa_varlen", "torch_varlen"])
def test_bf16_logprobs_are_near_those_of_the_cpu(
    kernel: str, start: Callable[..., FSDPEngine], batch: SequenceBatch
) -> None:
    on_cpu = logprobs(start(device="cpu", precision=PrecisionSpec(compute="fp32")), batch)
    # bf16 keeps 8 bits: 4e-3 an operation on logits of size 1, a dozen operations deep.
    torch.testing.assert_close(
        logprobs(start(attention=kernel), batch), on_cpu, rtol=0.0, atol=5e-2
    )


def test_the_fused_head_equals_all_logits_at_once() -> None:
    hidden = torch.randn(500, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(3001, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(0, 3001, (500,), device="cuda")
    actual = chunked_logprobs(hidden, weight, labels, chunk_tokens=130).logprob
    expected = torch.log_softmax((hidden @ weight.t()).float(), -1).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)
    for a, b in zip(
        torch.autograd.grad(actual.sum(), (hidden, weight)),
        torch.autograd.grad(expected.sum(), (hidden, weight)),
    ):
        assert float((a - b).float().norm() / b.float().norm()) < 1e-2


def test_offloading_frees_the_memory_of_the_device(start: Callable[..., FSDPEngine]) -> None:
    here = start()
    with_parameters = torch.cuda.memory_allocated()
    here.close()
    start(offload=OffloadSpec(parameters=True, optimizer=True))
    assert torch.cuda.memory_allocated() < with_parameters


OFFLOADS = (
    OffloadSpec(parameters=True, optimizer=True),
    OffloadSpec(optimizer=True, load_optimizer_in="train_mode"),
    OffloadSpec(optimizer_on_cpu=True),
)


def norms(engine: FSDPEngine, batch: SequenceBatch, *, count: int) -> list[float]:
    engine.set_loss_fn(
        lambda data, predictions, ctx: (-predictions["logprob"][data.loss_mask].mean(), ctx)
    )
    grad_norms = []
    for _ in range(count):
        engine.optimizer_zero_grad()
        with engine.train_mode():
            engine.forward_backward_step(batch)
        grad_norms.append(engine.optimizer_step())
    return grad_norms


@pytest.mark.parametrize(
    "offload", OFFLOADS, ids=["everything", "loaded ahead", "updated on the CPU"]
)
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1"])
def test_copies_on_a_separate_stream_do_not_change_results(
    start: Callable[..., FSDPEngine], batch: SequenceBatch, offload: OffloadSpec, strategy: str
) -> None:
    exact = PrecisionSpec(compute="fp32")
    here = norms(start(precision=exact, strategy=strategy), batch, count=5)
    away = norms(start(precision=exact, strategy=strategy, offload=offload), batch, count=5)
    # The update on the CPU rounds in another order than the fused kernel.
    assert away == (pytest.approx(here, rel=1e-4) if offload.optimizer_on_cpu else here)


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1"])
def test_offloaded_activations_do_not_change_results(
    start: Callable[..., FSDPEngine], batch: SequenceBatch, strategy: str
) -> None:
    settings = {
        "precision": PrecisionSpec(compute="fp32"),
        "strategy": strategy,
        "activation_checkpointing": True,
    }
    here = norms(start(**settings), batch, count=3)
    assert norms(start(**settings, offload_activations=True), batch, count=3) == here


def test_engine_that_updates_on_the_cpu_can_be_moved(
    start: Callable[..., FSDPEngine], batch: SequenceBatch
) -> None:
    settings = {
        "precision": PrecisionSpec(compute="fp32"),
        "offload": OffloadSpec(optimizer_on_cpu=True),
    }
    moved, unmoved = start(**settings), start(**settings)
    assert norms(moved, batch, count=1) == norms(unmoved, batch, count=1)
    moved.to("cpu")
    moved.to("device")
    assert norms(moved, batch, count=2) == norms(unmoved, batch, count=2)


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1"])
def test_fp16_trains_on_cuda(
    start: Callable[..., FSDPEngine], batch: SequenceBatch, strategy: str
) -> None:
    exact = norms(start(precision=PrecisionSpec(compute="fp32")), batch, count=3)
    scaled = norms(
        start(precision=PrecisionSpec(compute="fp16"), strategy=strategy), batch, count=3
    )
    assert scaled == pytest.approx(exact, rel=2e-2)


@pytest.mark.parametrize(
    "offload",
    [OffloadSpec(), *OFFLOADS],
    ids=["nothing", "everything", "loaded ahead", "updated on the CPU"],
)
def test_background_save_contains_the_state_at_its_start(
    start: Callable[..., FSDPEngine], batch: SequenceBatch, tmp_path: Path, offload: OffloadSpec
) -> None:
    engine = start(offload=offload, save_huggingface_weights=True)
    norms(engine, batch, count=1)
    state = list(engine.export_state())
    step = engine.save_checkpoint(str(tmp_path), global_step=1, in_background=True)
    norms(engine, batch, count=3)
    engine.finish_saving()
    other = start(offload=offload)
    other.load_checkpoint(step)
    for loaded, saved in zip(other.export_state(), state, strict=True):
        assert torch.equal(loaded.master, saved.master), loaded.name
        assert torch.equal(loaded.second_moment, saved.second_moment), loaded.name


@contextmanager
def forbid_synchronization() -> Iterator[None]:
    """Raise an error whenever the host waits for the device."""
    with warnings.catch_warnings():
        # Torch warns of every use.
        warnings.filterwarnings(
            "ignore", "Synchronization debug mode is a prototype feature", UserWarning
        )
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            # The mode is the process's, and would fail every test after this one.
            torch.cuda.set_sync_debug_mode("default")


def test_a_training_pass_never_waits_for_the_device(
    start: Callable[..., FSDPEngine], batch: SequenceBatch
) -> None:
    engine = start()
    packed = engine.shard_data(batch, max_tokens=20)
    micro_batch_loss = partial(_mean_logprob, denominator=packed.denominators.tokens)
    runner = engine._components.runner
    requested = frozenset({HeadOutput.LOGPROB})

    def update() -> None:
        runner.run(
            packed,
            requested_outputs=requested,
            with_gradient=requested,
            micro_batch_loss=micro_batch_loss,
            forward_only=False,
            reduce_gradients=True,
        )

    update()
    with forbid_synchronization():
        update()


def test_an_update_is_launched_before_its_norm_is_known(
    start: Callable[..., FSDPEngine], batch: SequenceBatch
) -> None:
    engine = start(optimizer=OptimizerSpec(lr=1e-2, clip_grad_norm=0.5))
    norms(engine, batch, count=1)
    engine.set_loss_fn(SftProbe())
    engine.optimizer_zero_grad()
    packed = engine.shard_data(batch, max_tokens=20)
    with engine.train_mode():
        result = engine.forward_backward_batch(packed, forward_only=False)
    optimizer = engine._components.optimizer
    assert isinstance(optimizer, ShardedAdamW)
    assert optimizer.is_async
    launched: list[int] = []

    def note() -> None:
        # On the way to here nothing waited: this mode turns every wait into an error.
        launched.append(torch.cuda.get_sync_debug_mode())
        torch.cuda.set_sync_debug_mode("default")

    with forbid_synchronization():
        norm = optimizer.step(lr=1e-2, after_launch=note)
    assert launched == [2]
    assert norm > 0
    assert result.metrics["speed/tokens_per_s"].result > 0


def test_norm_that_overflows_float32_is_computed_again_on_the_device(
    start: Callable[..., FSDPEngine], batch: SequenceBatch
) -> None:
    engine = start(optimizer=OptimizerSpec(lr=1e-2, clip_grad_norm=0.5))
    norms(engine, batch, count=1)
    optimizer, num_entries = engine._components.optimizer, 0
    assert isinstance(optimizer, ShardedAdamW)
    assert optimizer.is_async
    for parameter in engine._components.trainable.values():
        parameter.tensor.grad = torch.full_like(parameter.tensor, 1e25)
        num_entries += parameter.tensor.numel()
    assert optimizer.step(lr=1e-2) == pytest.approx(1e25 * num_entries**0.5, rel=1e-6)
    assert all(bool(state.second.isfinite().all()) for state in optimizer.adam_states.values())


@pytest.mark.parametrize("clip", [None, 0.01, 100.0])
def test_updates_on_device_and_host_are_equal(
    start: Callable[..., FSDPEngine], batch: SequenceBatch, clip: float | None
) -> None:
    spec = OptimizerSpec(lr=1e-2, clip_grad_norm=clip)
    grad_norms = []
    for is_async in (True, False):
        engine = start(optimizer=spec, precision=PrecisionSpec(compute="fp32"))
        optimizer = engine._components.optimizer
        assert isinstance(optimizer, ShardedAdamW)
        optimizer.is_async = is_async
        grad_norms.append(norms(engine, batch, count=4))
    assert grad_norms[0] == pytest.approx(grad_norms[1], rel=1e-6)


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_liger_kernels_are_as_exact_as_the_plain_formulas(compute: torch.dtype) -> None:
    pytest.importorskip(
        "liger_kernel", reason="needs liger-kernel: pip install './packages/engine-fsdp[liger]'"
    )
    device = torch.device("cuda", 0)
    check_kernels(
        load_kernels(device),
        name="liger-kernel",
        device=device,
        compute=compute,
        sizes={"norm": 896, "gate": 4864},
    )


def test_engine_with_liger_layers_trains_like_one_without(
    start: Callable[..., FSDPEngine], batch: SequenceBatch
) -> None:
    pytest.importorskip(
        "liger_kernel", reason="needs liger-kernel: pip install './packages/engine-fsdp[liger]'"
    )
    exact = PrecisionSpec(compute="fp32")
    plain = norms(start(precision=exact), batch, count=4)
    assert norms(start(precision=exact, liger_layers=True), batch, count=4) == pytest.approx(
        plain, rel=1e-4
    )


def _mean_logprob(head_outputs: HeadOutputs, micro: SequenceBatch, *, denominator: int) -> Tensor:
    return -head_outputs[HeadOutput.LOGPROB].sum() / denominator
