"""Test TransformerEngine's layers: refused where they cannot run, near torch's on a GPU."""

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.errors import CapabilityError, ConfigError
from temper_engine_api.specs import LoraSpec, ModelSpec, PrecisionSpec
from temper_engine_megatron.config import MegatronConfig
from temper_engine_megatron.engine import MegatronEngine

# Megatron-Core calls it, but the warning names contextlib.
pytestmark = pytest.mark.filterwarnings("ignore:fp8_autocast is deprecated:DeprecationWarning")

TORCH = {"layers": "torch", "float8": "none"}
BF16 = {"layers": "transformer_engine", "float8": "none"}
TENSORWISE = {"layers": "transformer_engine", "float8": "tensorwise"}
BLOCKWISE = {"layers": "transformer_engine", "float8": "blockwise"}


@pytest.fixture
def config(config: MegatronConfig) -> MegatronConfig:
    """Return the usual config in bf16 on the device that there is."""
    return replace(config, device="auto", precision=PrecisionSpec(compute="bf16"))


def run_update(engine: MegatronEngine, batch: SequenceBatch) -> Tensor:
    """Return the gradient of all parameters as one vector: AdamW's first moment, times ten."""
    engine.set_loss_fn(
        lambda data, predictions, ctx: (-predictions["logprob"][data.loss_mask].mean(), ctx)
    )
    engine.optimizer_zero_grad()
    with engine.train_mode():
        engine.forward_backward_step(batch)
    engine.optimizer_step()
    with engine.export_state() as state:
        tensors = {entry.name: entry.first_moment for entry in state}
    return torch.cat([tensors[name].float().flatten().cpu() for name in sorted(tensors)]) * 10


def compute_logprobs(engine: MegatronEngine, batch: SequenceBatch) -> Tensor:
    with engine.eval_mode():
        predictions, _ = engine.forward_backward_step(batch, forward_only=True)
    assert predictions is not None
    return predictions["logprob"].cpu()


def change_last_sequence(batch: SequenceBatch) -> tuple[SequenceBatch, slice]:
    """Return the batch with other tokens in its last sequence, and the range of all others."""
    start = int(batch.sequence_starts[-2])
    tokens = batch.tokens.clone()
    tokens[start:] = (tokens[start:] + 7) % 61
    return replace(batch, tokens=tokens), slice(0, start)


@pytest.mark.skipif(
    find_spec("transformer_engine") is not None,
    reason="an environment without TransformerEngine runs it",
)
def test_missing_package_is_refused_with_the_command_that_installs_it(
    config: MegatronConfig, start: Callable[..., MegatronEngine]
) -> None:
    expected = r"TransformerEngine is not installed: run pip install .*transformer-engine\[pytorch"
    with pytest.raises(ConfigError, match=expected):
        start(**BF16)
    # What `temper-train --check` calls.
    with pytest.raises(ConfigError, match=expected):
        MegatronEngine.check_model(replace(config, layers="transformer_engine"))


on_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or find_spec("transformer_engine") is None,
    reason="needs a GPU with float8, such as one H100, and transformer-engine",
)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(
    ("layers", "tolerance"),
    # bf16 has 8 significant bits, and a float8 number 4: an error of 3 % per operand.
    [(BF16, 0.02), (TENSORWISE, 0.15), (BLOCKWISE, 0.15)],
    ids=["bf16", "tensorwise", "blockwise"],
)
def test_gradients_are_near_those_of_torchs_layers(
    layers: dict[str, str],
    tolerance: float,
    start: Callable[..., MegatronEngine],
    batch: SequenceBatch,
) -> None:
    # A pack of 35 tokens has to be padded for a float8 product.
    assert len(batch.tokens) % 16
    expected = run_update(start(**TORCH), batch)
    actual = run_update(start(**layers), batch)
    assert not torch.equal(actual, expected)
    assert (actual - expected).norm() < tolerance * expected.norm()


@pytest.mark.gpu
@on_gpu
def test_only_tensorwise_logprobs_depend_on_other_sequences(
    start: Callable[..., MegatronEngine], batch: SequenceBatch
) -> None:
    other, unchanged = change_last_sequence(batch)
    is_equal = {}
    for layers in (BF16, TENSORWISE, BLOCKWISE):
        engine = start(**layers)
        first, second = (compute_logprobs(engine, each)[unchanged] for each in (batch, other))
        is_equal[layers["float8"]] = torch.equal(first, second)
    assert is_equal == {"none": True, "tensorwise": False, "blockwise": True}


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(("saved", "loaded"), [(TORCH, BLOCKWISE), (TENSORWISE, TORCH)])
def test_checkpoints_are_independent_of_the_layers(
    saved: dict[str, str],
    loaded: dict[str, str],
    start: Callable[..., MegatronEngine],
    batch: SequenceBatch,
    tmp_path: Path,
) -> None:
    first = start(**saved)
    run_update(first, batch)
    path = first.save_checkpoint(str(tmp_path), global_step=1)
    second = start(**loaded)
    second.load_checkpoint(path)
    with first.export_state() as before, second.export_state() as after:
        states = [{entry.name: entry for entry in stream} for stream in (before, after)]
    assert states[0].keys() == states[1].keys()
    for name, entry in states[0].items():
        other = states[1][name]
        assert torch.equal(entry.master, other.master)
        assert torch.equal(entry.first_moment, other.first_moment)
        assert torch.equal(entry.second_moment, other.second_moment)
    run_update(second, batch)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("layers", [BF16, TENSORWISE, BLOCKWISE])
def test_resumed_update_equals_the_uninterrupted_one(
    layers: dict[str, str],
    start: Callable[..., MegatronEngine],
    batch: SequenceBatch,
    tmp_path: Path,
) -> None:
    engine = start(**layers)
    run_update(engine, batch)
    path = engine.save_checkpoint(str(tmp_path), global_step=1)
    expected = run_update(engine, batch)
    engine.load_checkpoint(path)
    assert torch.equal(run_update(engine, batch), expected)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("layers", [BF16, TENSORWISE])
def test_gradients_of_several_calls_add_up(
    layers: dict[str, str], start: Callable[..., MegatronEngine], batch: SequenceBatch
) -> None:
    # The products add to the sum of gradients. TransformerEngine would overwrite it in the first
    # micro-batch of a call.
    engine = start(**layers)
    engine.set_loss_fn(
        lambda data, predictions, ctx: (-predictions["logprob"][data.loss_mask].sum(), ctx)
    )
    norms = []
    for num_calls in (1, 2):
        engine.optimizer_zero_grad()
        with engine.train_mode():
            for _ in range(num_calls):
                engine.forward_backward_step(batch)
        parameters = engine._components.chunks.unwrapped[0].parameters()
        norms.append([float(vars(p)["main_grad"].norm()) for p in parameters])
        engine._zero_gradients()
    assert norms[1] == pytest.approx([2 * norm for norm in norms[0]], rel=1e-3)


@pytest.mark.gpu
@on_gpu
def test_layers_recompute_and_take_adapters(
    start: Callable[..., MegatronEngine], batch: SequenceBatch
) -> None:
    for layers in (BF16, TENSORWISE, BLOCKWISE):
        expected = run_update(start(**layers), batch)
        assert torch.equal(run_update(start(**layers, recompute="layers"), batch), expected)
    lora = LoraSpec(rank=4, alpha=8.0, target_modules=("q_proj", "o_proj", "up_proj", "down_proj"))
    expected = run_update(start(**TORCH, lora=lora), batch)
    actual = run_update(start(**BF16, lora=lora), batch)
    assert (actual - expected).norm() < 0.02 * expected.norm()


@pytest.mark.gpu
@on_gpu
def test_unaligned_sizes_are_refused_in_float8_only(
    config: MegatronConfig, start: Callable[..., MegatronEngine]
) -> None:
    architecture = {**config.model.architecture, "intermediate_size": 40}
    model = ModelSpec(architecture=architecture)
    with pytest.raises(CapabilityError, match="both sizes must be multiples of 16"):
        start(**TENSORWISE, model=model)
    start(**BF16, model=model)
