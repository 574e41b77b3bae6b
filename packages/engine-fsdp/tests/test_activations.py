"""Computing layers again, keeping some products, and parking inputs in host memory: all without changing a bit."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.errors import ConfigError
from temper_engine_fsdp.activations import ActivationParking
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.engine import FSDPEngine

Start = Callable[..., FSDPEngine]


def norms(engine: FSDPEngine, batch: SequenceBatch) -> list[float]:
    engine.set_loss_fn(lambda data, predictions, ctx: (-predictions["logprob"][data.loss_mask].mean(), ctx))
    found = []
    for _ in range(3):
        engine.optimizer_zero_grad()
        with engine.train_mode():
            engine.forward_backward_step(batch)
        found.append(engine.optimizer_step())
    return found


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1"])
@pytest.mark.parametrize("is_selective", [False, True], ids=["full", "selective"])
@pytest.mark.parametrize("is_offloaded", [False, True], ids=["here", "offloaded"])
def test_checkpointing_changes_no_bit(start: Start, batch: SequenceBatch, strategy: str, is_selective: bool, is_offloaded: bool) -> None:
    plain = norms(start(strategy=strategy), batch)
    again = start(
        strategy=strategy,
        activation_checkpointing=True,
        checkpointing_keeps_products=is_selective,
        offload_activations=is_offloaded,
    )
    assert norms(again, batch) == plain


def num_products(engine: FSDPEngine, batch: SequenceBatch) -> int:
    with torch.profiler.profile() as seen:
        norms(engine, batch)
    return sum(event.count for event in seen.key_averages() if event.key in ("aten::mm", "aten::addmm"))


def test_selective_checkpointing_computes_fewer_products_again_than_full(start: Start, batch: SequenceBatch) -> None:
    none = num_products(start(), batch)
    full = num_products(start(activation_checkpointing=True), batch)
    selective = num_products(start(activation_checkpointing=True, checkpointing_keeps_products=True), batch)
    # Three updates, two layers of seven products. The last one of a layer is never needed again; of the others every second is kept.
    assert full - none == 3 * 2 * 6
    assert selective - none == 3 * 2 * 3


def test_inputs_of_all_layers_are_parked(start: Start, batch: SequenceBatch, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ActivationParking] = []
    initialise = ActivationParking.__init__

    def note(parking: ActivationParking, device: torch.device) -> None:
        initialise(parking, device)
        made.append(parking)

    monkeypatch.setattr(ActivationParking, "__init__", note)
    norms(start(activation_checkpointing=True, offload_activations=True), batch)
    # Three passes; the inputs of two layers, and what the norm after them keeps.
    assert len(made) == 3
    assert all(2 <= parking.num_parked <= 6 for parking in made)


def test_options_of_checkpointing_without_it_are_refused(config: FSDPConfig) -> None:
    with pytest.raises(ConfigError, match="checkpointing_keeps_products is on, but has no effect without activation_checkpointing"):
        replace(config, checkpointing_keeps_products=True)
    with pytest.raises(ConfigError, match="offload_activations is on, but has no effect without activation_checkpointing"):
        replace(config, offload_activations=True)


def test_selective_checkpointing_of_compiled_layers_is_refused(config: FSDPConfig) -> None:
    with pytest.raises(ConfigError, match="switch one of them off"):
        replace(config, activation_checkpointing=True, checkpointing_keeps_products=True, compile_layers=True)
