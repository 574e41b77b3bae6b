"""Test any torch optimizer by path: arguments, parameter groups and saved states."""

import sys
from collections.abc import Callable, Iterable
from copy import deepcopy
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.errors import CapabilityError, ConfigError
from temper_engine_api.specs import OffloadSpec, OptimizerSpec
from temper_engine_fsdp.engine import FSDPEngine
from temper_engine_fsdp.training.torch_optimizer import TorchOptimizer

MOMENTUM = OptimizerSpec(
    name="torch.optim.SGD",
    arguments={"momentum": 0.9},
    lr=0.1,
    weight_decay=0.5,
    clip_grad_norm=None,
)


def update(engine: FSDPEngine, batch: SequenceBatch) -> dict[str, torch.Tensor]:
    engine.set_loss_fn(
        lambda data, predictions, ctx: (-predictions["logprob"][data.loss_mask].mean(), ctx)
    )
    engine.optimizer_zero_grad()
    with engine.train_mode():
        engine.forward_backward_step(batch)
    engine.optimizer_step()
    with engine.export_weights() as stream:
        return dict(stream)


def logprobs_of(model: PreTrainedModel, batch: SequenceBatch) -> torch.Tensor:
    """Return the [T] log-probs of all sequences; 0 for the first token of each."""
    label_logprobs = []
    for tokens, temperature in zip(
        batch.tokens.split(batch.lengths.tolist()), batch.temperature, strict=True
    ):
        logprobs = torch.log_softmax(model(tokens[None]).logits[0] / temperature, -1)
        label_logprobs += [torch.zeros(1), logprobs[:-1].gather(1, tokens[1:, None])[:, 0]]
    return torch.cat(label_logprobs)


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1"])
def test_weight_decay_applies_to_matrices_only(
    start: Callable[..., FSDPEngine], batch: SequenceBatch, strategy: str
) -> None:
    engine = start(optimizer=MOMENTUM, strategy=strategy)
    with engine.export_weights() as stream:
        before = dict(stream)
    after = update(engine, batch)
    adamw = start(optimizer=OptimizerSpec(lr=0.0, betas=(0.0, 0.999), clip_grad_norm=None))
    update(adamw, batch)
    # With a first beta of 0 the first moment is the gradient. The first step of SGD is lr *
    # (gradient + decay * weight).
    for state in adamw.export_state():
        decay = 0.5 if state.master.ndim >= 2 else 0.0
        expected = before[state.name] - 0.1 * (state.first_moment + decay * before[state.name])
        torch.testing.assert_close(
            after[state.name], expected, rtol=1e-5, atol=1e-6, msg=state.name
        )


@pytest.mark.bitwise
@pytest.mark.parametrize("name", ["torch.optim.SGD", "torch.optim.RMSprop", "torch.optim.NAdam"])
@pytest.mark.parametrize(("saver", "loader"), [("fsdp2", "fsdp2"), ("fsdp1", "fsdp2")])
def test_its_state_is_resumed_bit_for_bit(
    start: Callable[..., FSDPEngine],
    batch: SequenceBatch,
    tmp_path: Path,
    name: str,
    saver: str,
    loader: str,
) -> None:
    spec = OptimizerSpec(
        name=name, arguments={"momentum": 0.9} if name.endswith(("SGD", "prop")) else {}, lr=0.01
    )
    engine = start(optimizer=spec, strategy=saver, offload=OffloadSpec(optimizer=True))
    update(engine, batch)
    step = engine.save_checkpoint(str(tmp_path), global_step=1)
    uninterrupted = update(engine, batch)
    other = start(optimizer=spec, strategy=loader)
    other.load_checkpoint(step)
    resumed = update(other, batch)
    assert all(torch.equal(resumed[key], weight) for key, weight in uninterrupted.items())


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (
            OptimizerSpec(name="torch.optim.Nothing"),
            r"torch.optim has no torch.optim.Optimizer of that name",
        ),
        (
            OptimizerSpec(name="nowhere.at.All"),
            r"optimizer.name is nowhere.at.All, but nowhere.at cannot be imported",
        ),
        (
            OptimizerSpec(name="torch.optim.SGD", arguments={"momentom": 0.9}),
            r"optimizer.arguments.momentom is not an argument of torch",
        ),
        (
            OptimizerSpec(name="torch.optim.SGD", arguments={"momentum": "much"}),
            r"optimizer.arguments.momentum is 'much', but torch.optim.SGD expects a value like 0",
        ),
        (
            OptimizerSpec(name="torch.optim.SGD", arguments={"nesterov": 1}),
            r"optimizer.arguments.nesterov is 1, but torch.optim.SGD expects a value like False",
        ),
        (
            OptimizerSpec(name="torch.optim.Adam", arguments={"betas": (0.9,)}),
            r"betas is \(0.9,\), but torch.optim.Adam expects a value like \(0.9, 0.999\)",
        ),
    ],
)
def test_invalid_optimizer_settings_are_refused(
    start: Callable[..., FSDPEngine], spec: OptimizerSpec, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        start(optimizer=spec)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("LBFGS", r"torch\.optim\.LBFGS needs a closure that recomputes the loss"),
        (
            "Adafactor",
            r"torch\.optim\.Adafactor cannot update parameters sharded with strategy fsdp2: aten",
        ),
        (
            "Rprop",
            r"torch\.optim\.Rprop cannot update parameters sharded with strategy fsdp2: aten",
        ),
        (
            "SparseAdam",
            r"torch\.optim\.SparseAdam cannot update.*SparseAdam does not support dense gradients",
        ),
        (
            "Muon",
            r"torch\.optim\.Muon does not accept this model's parameters: Muon only supports 2D",
        ),
    ],
)
def test_optimizer_that_cannot_update_is_refused_before_training(
    start: Callable[..., FSDPEngine], name: str, sentence: str
) -> None:
    with pytest.raises(CapabilityError, match=f"optimizer.name {sentence}"):
        # With the default weight decay, which some of them do not take: that is not the reason.
        start(optimizer=OptimizerSpec(name=f"torch.optim.{name}"))


def test_weight_decay_that_a_usable_optimizer_does_not_take_is_refused(
    start: Callable[..., FSDPEngine],
) -> None:
    with pytest.raises(ConfigError, match=r"Rprop takes no weight decay: set it to 0"):
        start(optimizer=OptimizerSpec(name="torch.optim.Rprop"), strategy="fsdp1")


class Factored(torch.optim.Optimizer):
    """Keep one number per row, as memory-saving optimizers do."""

    def __init__(self, params: Iterable[dict[str, object]], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["rows"] = parameter.grad.square().sum(-1)


def test_a_state_that_cannot_be_saved_is_rejected_before_training(
    start: Callable[..., FSDPEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "of_a_user", sys.modules[__name__])
    with pytest.raises(
        CapabilityError, match="keeps a rows that is not sharded like its parameter"
    ):
        start(optimizer=OptimizerSpec(name="of_a_user.Factored", weight_decay=0.0))


def test_trying_an_optimizer_does_not_change_weights_or_states(
    start: Callable[..., FSDPEngine],
) -> None:
    engine, plain = start(optimizer=MOMENTUM), start()
    with engine.export_weights() as native, plain.export_weights() as torch_weights:
        assert all(
            torch.equal(tensor, other)
            for (_, tensor), (_, other) in zip(native, torch_weights, strict=True)
        )
    optimizer = engine._components.optimizer
    assert isinstance(optimizer, TorchOptimizer)
    assert optimizer.state_tensors() == {}
    assert all(
        parameter.local_gradient() is None for parameter in engine._components.trainable.values()
    )


# The README allows any optimizer of torch: each trains a sharded model like an unsharded one.
@pytest.mark.bitwise
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("RAdam", "fsdp2"),
        ("Rprop", "fsdp1"),
        *(
            # Nightly: the engine treats all of them alike, so one with each strategy runs every
            # day.
            pytest.param(*row, marks=pytest.mark.nightly)
            for row in product(
                ("Adadelta", "Adagrad", "Adam", "Adamax", "ASGD", "NAdam", "RMSprop", "SGD"),
                ("fsdp2", "fsdp1"),
            )
        ),
    ],
)
def test_torch_optimizers_equal_training_of_an_unsharded_model(
    start: Callable[..., FSDPEngine], batch: SequenceBatch, tmp_path: Path, name: str, strategy: str
) -> None:
    decay = 0.0 if name == "Rprop" else 0.1
    spec = OptimizerSpec(
        name=f"torch.optim.{name}", lr=0.01, weight_decay=decay, clip_grad_norm=None
    )
    engine = start(optimizer=spec, strategy=strategy)
    model = AutoModelForCausalLM.from_config(
        deepcopy(engine._components.hf_config), attn_implementation="eager"
    )
    with engine.export_weights() as stream:
        model.load_state_dict(dict(stream), strict=False)  # the head is tied
    matrices, vectors = (
        [p for p in model.parameters() if (p.ndim >= 2) is is_matrix] for is_matrix in (True, False)
    )
    groups = [
        {"params": ps, **({"weight_decay": rate} if decay else {})}
        for ps, rate in ((matrices, decay), (vectors, 0.0))
    ]
    optimizer = getattr(torch.optim, name)(groups, lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        (-logprobs_of(model, batch)[batch.loss_mask].mean()).backward()
        optimizer.step()
        weights = update(engine, batch)
    for key, weight in model.named_parameters():
        torch.testing.assert_close(weights[key], weight.detach(), rtol=1e-3, atol=1e-4, msg=key)
    step = engine.save_checkpoint(str(tmp_path), global_step=1)
    other = start(optimizer=spec, strategy=strategy)
    other.load_checkpoint(step)
    uninterrupted, resumed = update(engine, batch), update(other, batch)
    assert all(torch.equal(resumed[key], weight) for key, weight in uninterrupted.items())


def test_an_optimizer_that_needs_full_parameters_is_rejected_with_fsdp1(
    start: Callable[..., FSDPEngine],
) -> None:
    with pytest.raises(
        CapabilityError,
        match=r"torch.optim.Adafactor may need full parameters, but strategy fsdp1",
    ):
        start(optimizer=OptimizerSpec(name="torch.optim.Adafactor"), strategy="fsdp1")
