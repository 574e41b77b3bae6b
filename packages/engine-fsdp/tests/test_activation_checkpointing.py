"""Test that recomputing layers and offloading their inputs does not change a bit."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.errors import ConfigError
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.engine import FSDPEngine
from temper_engine_fsdp.model.activation_checkpointing import ActivationOffloader

Start = Callable[..., FSDPEngine]


def norms(engine: FSDPEngine, batch: SequenceBatch) -> list[float]:
    engine.set_loss_fn(
        lambda data, predictions, ctx: (-predictions["logprob"][data.loss_mask].mean(), ctx)
    )
    grad_norms = []
    for _ in range(3):
        engine.optimizer_zero_grad()
        with engine.train_mode():
            engine.forward_backward_step(batch)
        grad_norms.append(engine.optimizer_step())
    return grad_norms


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1"])
@pytest.mark.parametrize("is_selective", [False, True], ids=["full", "selective"])
@pytest.mark.parametrize("is_offloaded", [False, True], ids=["here", "offloaded"])
def test_checkpointing_changes_no_bit(
    start: Start, batch: SequenceBatch, strategy: str, is_selective: bool, is_offloaded: bool
) -> None:
    plain = norms(start(strategy=strategy), batch)
    again = start(
        strategy=strategy,
        activation_checkpointing=True,
        checkpointing_keeps_products=is_selective,
        offload_activations=is_offloaded,
    )
    assert norms(again, batch) == plain


def test_saved_tensors_that_are_not_on_the_device_stay_as_they_are() -> None:
    offloader = ActivationOffloader(torch.device("meta"))
    saved = torch.ones(2, requires_grad=True)
    with offloader.offload_saved_tensors():
        product = saved * saved
    assert not offloader.offloaded
    product.sum().backward()
    assert saved.grad is not None
    assert saved.grad.tolist() == [2.0, 2.0]


class Products(TorchDispatchMode):
    """Count the matmuls that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        self.num += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs if isinstance(kwargs, dict) else {}))


def num_products(engine: FSDPEngine, batch: SequenceBatch) -> int:
    with Products() as products:
        norms(engine, batch)
    return products.num


def test_selective_checkpointing_computes_fewer_products_again_than_full(
    start: Start, batch: SequenceBatch
) -> None:
    none = num_products(start(), batch)
    full = num_products(start(activation_checkpointing=True), batch)
    selective = num_products(
        start(activation_checkpointing=True, checkpointing_keeps_products=True), batch
    )
    # Three updates, two layers of seven products. Nothing needs the last one's result; of the
    # others the first, third and fifth are kept.
    assert full - none == 3 * 2 * 6
    assert selective - none == 3 * 2 * 3


def test_inputs_of_all_layers_are_offloaded(
    start: Start, batch: SequenceBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[ActivationOffloader] = []
    initialise = ActivationOffloader.__init__

    def note(offloader: ActivationOffloader, device: torch.device) -> None:
        initialise(offloader, device)
        made.append(offloader)

    monkeypatch.setattr(ActivationOffloader, "__init__", note)
    engine = start(activation_checkpointing=True, offload_activations=True)
    entered: list[Tensor] = []
    for layer in engine._components.sharded.root.hf.model.layers:
        layer.input_layernorm.register_forward_pre_hook(
            lambda _, args: entered.append(args[0].detach().clone())
        )
    norms(engine, batch)
    # Three passes of two layers, each of which is entered again in the backward pass.
    assert len(made) == 3
    assert len(entered) == 3 * 2 * 2 + 3 * 2
    hosts = [pair.host for offloader in made for pair in offloader.offloaded]
    assert all(
        any(torch.equal(host, inputs) for host in hosts if host.shape == inputs.shape)
        for inputs in entered[:2]
    )


def test_options_of_checkpointing_without_it_are_refused(config: FSDPConfig) -> None:
    with pytest.raises(
        ConfigError,
        match="has no effect without activation_checkpointing",
    ):
        replace(config, checkpointing_keeps_products=True)
    with pytest.raises(
        ConfigError,
        match="offload_activations is on, but has no effect without activation_checkpointing",
    ):
        replace(config, offload_activations=True)


def test_selective_checkpointing_of_compiled_layers_is_refused(config: FSDPConfig) -> None:
    with pytest.raises(ConfigError, match="compiled layers fuse operators"):
        replace(
            config,
            activation_checkpointing=True,
            checkpointing_keeps_products=True,
            compile_layers=True,
        )
