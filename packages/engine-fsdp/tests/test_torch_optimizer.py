"""Any torch optimizer by its path: arguments that are checked, two groups, and states that come back from a checkpoint."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.errors import CapabilityError, ConfigError
from temper_engine_api.specs import OptimizerSpec, ResidencySpec
from temper_engine_fsdp.engine import FSDPEngine

MOMENTUM = OptimizerSpec(name="torch.optim.SGD", arguments={"momentum": 0.9}, lr=0.1, weight_decay=0.5, clip_grad_norm=None)


def update(engine: FSDPEngine, batch: SequenceBatch) -> dict[str, torch.Tensor]:
    engine.set_loss_fn(lambda data, predictions, ctx: (-predictions["logprob"][data.loss_mask].mean(), ctx))
    engine.optimizer_zero_grad()
    with engine.train_mode():
        engine.forward_backward_step(batch)
    engine.optimizer_step()
    with engine.export_weights() as stream:
        return dict(stream)


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1"])
def test_momentum_decays_matrices_and_spares_vectors(start: Callable[..., FSDPEngine], batch: SequenceBatch, strategy: str) -> None:
    engine = start(optimizer=MOMENTUM, strategy=strategy)
    with engine.export_weights() as stream:
        before = dict(stream)
    after = update(engine, batch)
    adamw = start(optimizer=OptimizerSpec(lr=0.0, betas=(0.0, 0.999), clip_grad_norm=None))
    update(adamw, batch)
    # With a first beta of 0 the first moment is the gradient. The first step of SGD is lr * (gradient + decay * weight).
    for state in adamw.export_state():
        decay = 0.5 if state.master.ndim >= 2 else 0.0
        expected = before[state.name] - 0.1 * (state.first_moment + decay * before[state.name])
        torch.testing.assert_close(after[state.name], expected, rtol=1e-5, atol=1e-6, msg=state.name)


@pytest.mark.parametrize("name", ["torch.optim.SGD", "torch.optim.RMSprop", "torch.optim.NAdam"])
@pytest.mark.parametrize(("saver", "loader"), [("fsdp2", "fsdp2"), ("fsdp1", "fsdp2")])
def test_its_state_is_resumed_bit_for_bit(
    start: Callable[..., FSDPEngine], batch: SequenceBatch, tmp_path: Path, name: str, saver: str, loader: str
) -> None:
    spec = OptimizerSpec(name=name, arguments={"momentum": 0.9} if name.endswith(("SGD", "prop")) else {}, lr=0.01)
    engine = start(optimizer=spec, strategy=saver, residency=ResidencySpec(offload_optimizer=True))
    update(engine, batch)
    step = engine.save_checkpoint(str(tmp_path), global_step=1)
    whole = update(engine, batch)
    other = start(optimizer=spec, strategy=loader)
    other.load_checkpoint(step)
    resumed = update(other, batch)
    assert all(torch.equal(resumed[key], weight) for key, weight in whole.items())


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (OptimizerSpec(name="torch.optim.Nothing"), r"there is no torch.optim.Optimizer of that name in torch.optim"),
        (OptimizerSpec(name="nowhere.at.All"), r"optimizer.name is nowhere.at.All, but nowhere.at can't be imported"),
        (OptimizerSpec(name="torch.optim.SGD", arguments={"momentom": 0.9}), r"optimizer.arguments.momentom is no argument of torch"),
        (
            OptimizerSpec(name="torch.optim.SGD", arguments={"momentum": "much"}),
            r"optimizer.arguments.momentum is 'much', but torch.optim.SGD takes something like 0",
        ),
        (
            OptimizerSpec(name="torch.optim.SGD", arguments={"nesterov": 1}),
            r"optimizer.arguments.nesterov is 1, but torch.optim.SGD takes something like False",
        ),
        (
            OptimizerSpec(name="torch.optim.Adam", arguments={"betas": (0.9,)}),
            r"optimizer.arguments.betas is \(0.9,\), but torch.optim.Adam takes something like \(0.9, 0.999\)",
        ),
        (OptimizerSpec(name="torch.optim.LBFGS"), r"torch.optim.LBFGS has no weight decay: set it to 0"),
    ],
)
def test_what_makes_no_sense_is_refused(start: Callable[..., FSDPEngine], spec: OptimizerSpec, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        start(optimizer=spec)


def test_an_optimizer_that_looks_at_whole_parameters_is_refused_where_they_are_in_pieces(start: Callable[..., FSDPEngine]) -> None:
    with pytest.raises(CapabilityError, match=r"torch.optim.Adafactor may look at whole parameters, but strategy fsdp1"):
        start(optimizer=OptimizerSpec(name="torch.optim.Adafactor"), strategy="fsdp1")
