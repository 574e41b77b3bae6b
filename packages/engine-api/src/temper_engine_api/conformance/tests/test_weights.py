"""Laws: weights leave and arrive whole, under Hugging Face names; the portable state carries a run from one engine to another."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.capabilities import Capability
from temper_engine_api.conformance.harness.engine_under_test import EngineUnderTest
from temper_engine_api.conformance.harness.measurements import (
    ONE_MICRO_BATCH,
    Update,
    collect_state,
    collect_weights,
    rank_slice,
    run_update,
)
from temper_engine_api.conformance.harness.rank import ADAMW, EngineSetup, Rank
from temper_engine_api.conformance.harness.tolerances import (
    LOGPROB,
    assert_all_equal,
    assert_close,
    assert_same_state,
)
from temper_engine_api.conformance.inputs.probes import ClippedPpoProbe
from temper_engine_api.conformance.inputs.tiny_models import (
    LANGUAGE_MODELS,
    QWEN2_GROUPED,
    QWEN2_TIED,
    QWEN2_UNTIED,
    VALUE,
    TinyModel,
)
from temper_engine_api.conformance.oracle.oracle_cache import OracleCache
from temper_engine_api.engine import BaseEngine
from temper_engine_api.errors import EngineStateError, WeightError
from temper_engine_api.objective import HeadOutput
from temper_engine_api.outputs import ForwardOutputs
from temper_engine_api.weights import NamedWeight, TrainingState

MODELS = (
    *LANGUAGE_MODELS,
    pytest.param(VALUE, marks=pytest.mark.if_claimed(Capability.VALUE_MODEL)),
)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_exported_weights_equal_the_loaded_files(
    engine_under_test: EngineUnderTest, oracle: OracleCache, model: TinyModel
) -> None:
    setup = oracle.make_setup(model)
    on_disk = load_file(Path(setup.model_path) / "model.safetensors")
    of_ranks = engine_under_test.run(export_weights, setup=setup)
    for exported in of_ranks:
        assert_all_equal(
            exported, as_exported(on_disk, exported, engine_under_test), what="weights"
        )
        assert list(exported) == list(of_ranks[0]), "the order differs between ranks"


def as_exported(
    expected: dict[str, Tensor], exported: dict[str, Tensor], engine_under_test: EngineUnderTest
) -> dict[str, Tensor]:
    """Where an engine computes in bf16 it may export that; else the bits of the master weights."""
    if engine_under_test.rank_pool.compute != "bf16":
        return expected
    return {
        name: tensor.bfloat16() if exported[name].dtype == torch.bfloat16 else tensor
        for name, tensor in expected.items()
    }


def export_weights(rank: Rank, *, setup: EngineSetup) -> dict[str, Tensor]:
    """In the order of the stream."""
    return collect_weights(rank.cached_engine(setup))


@pytest.mark.parametrize("model", LANGUAGE_MODELS, ids=lambda model: model.name)
def test_exported_weights_give_same_logits_in_transformers(
    engine_under_test: EngineUnderTest, oracle: OracleCache, model: TinyModel, tmp_path: Path
) -> None:
    # After an update, so that a stale copy shows; loaded by transformers itself, which names what is missing or unexpected.
    setup, batch = oracle.make_setup(model, optimizer=ADAMW), oracle.get_batch(model=model)
    exported, outputs = engine_under_test.run(
        weights_and_outputs_after_an_update, setup=setup, batch=batch
    )[0]
    folder = write_directory(exported, like=Path(setup.model_path), folder=tmp_path / "exported")
    _, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not loading["unexpected_keys"]
    assert set(loading["missing_keys"]) <= ({"lm_head.weight"} if is_tied(model) else set())
    expected = oracle.get_outputs(EngineSetup(model_path=str(folder)), batch, HeadOutput.LOGPROB)
    assert_close(outputs.columns[HeadOutput.LOGPROB], expected, LOGPROB, what="log-probs")


def is_tied(model: TinyModel) -> bool:
    return bool(model.architecture["tie_word_embeddings"])


def write_directory(weights: dict[str, Tensor], *, like: Path, folder: Path) -> Path:
    folder.mkdir()
    shutil.copy(like / "config.json", folder)
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return folder


def weights_and_outputs_after_an_update(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch
) -> tuple[dict[str, Tensor], ForwardOutputs]:
    """What is exported and what the engine itself computes with it."""
    engine = rank.temporary_engine(setup)
    train_once(engine, batch)
    with engine.eval_mode():
        local_batch = rank_slice(engine, batch, split=ONE_MICRO_BATCH)
        result = engine.forward_backward_batch(
            local_batch, forward_only=True, outputs=[HeadOutput.LOGPROB]
        )
    return collect_weights(engine), engine.unshard_outputs(
        result.outputs, sample_ids=batch.sample_ids
    )


def train_once(engine: BaseEngine, batch: SequenceBatch) -> Update:
    engine.set_loss_fn(ClippedPpoProbe())
    return run_update(engine, [rank_slice(engine, batch, split=ONE_MICRO_BATCH)])


@pytest.mark.parametrize("model", [QWEN2_TIED, QWEN2_UNTIED], ids=lambda model: model.name)
def test_loaded_weights_are_exported_unchanged(
    engine_under_test: EngineUnderTest, oracle: OracleCache, model: TinyModel
) -> None:
    setup = oracle.make_setup(model)
    other = load_file(oracle.write_model(model, seed=1) / "model.safetensors")
    weights, masters = engine_under_test.run(weights_after_loading, setup=setup, weights=other)[0]
    assert_all_equal(weights, as_exported(other, weights, engine_under_test), what="weights")
    assert_all_equal(masters, other, what="master weights")


def weights_after_loading(
    rank: Rank, *, setup: EngineSetup, weights: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Exported weights, and master weights."""
    engine = rank.temporary_engine(setup)
    engine.load_weights(NamedWeight(name, tensor) for name, tensor in weights.items())
    return collect_weights(engine), {
        name: state.master for name, state in collect_state(engine).items()
    }


def test_loaded_weights_are_used(engine_under_test: EngineUnderTest, oracle: OracleCache) -> None:
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    other = oracle.write_model(QWEN2_GROUPED, seed=1)
    expected = oracle.get_outputs(replace(setup, model_path=str(other)), batch, HeadOutput.LOGPROB)
    weights = load_file(other / "model.safetensors")
    outputs = engine_under_test.run(
        outputs_after_loading, setup=setup, weights=weights, batch=batch
    )[0]
    assert_close(outputs.columns[HeadOutput.LOGPROB], expected, LOGPROB, what="log-probs")


def outputs_after_loading(
    rank: Rank, *, setup: EngineSetup, weights: dict[str, Tensor], batch: SequenceBatch
) -> ForwardOutputs:
    """In an engine of its own."""
    engine = rank.temporary_engine(setup)
    engine.load_weights(NamedWeight(name, tensor) for name, tensor in weights.items())
    with engine.eval_mode():
        local_batch = rank_slice(engine, batch, split=ONE_MICRO_BATCH)
        result = engine.forward_backward_batch(
            local_batch, forward_only=True, outputs=[HeadOutput.LOGPROB]
        )
    return engine.unshard_outputs(result.outputs, sample_ids=batch.sample_ids)


@pytest.mark.parametrize("fault", ["missing", "unexpected", "repeated", "misshapen"])
def test_invalid_weights_are_rejected_without_changes(
    engine_under_test: EngineUnderTest, oracle: OracleCache, fault: str
) -> None:
    setup = oracle.make_setup(QWEN2_GROUPED)
    other = load_file(oracle.write_model(QWEN2_GROUPED, seed=1) / "model.safetensors")
    for message, before, after in engine_under_test.run(
        refused_weights, setup=setup, stream=spoilt(other, fault)
    ):
        assert "model.norm.weight" in message or "twice" in message
        assert_all_equal(after, before, what="weights")


def spoilt(weights: dict[str, Tensor], fault: str) -> list[NamedWeight]:
    """The fault comes last, when everything else has already arrived."""
    name = "model.norm.weight"
    good = [NamedWeight(n, tensor) for n, tensor in weights.items() if n != name]
    last = NamedWeight(name, weights[name])
    return {
        "missing": good,
        "unexpected": [*good, last, NamedWeight("model.norm.weight.extra", last.tensor)],
        "repeated": [*good, last, last],
        "misshapen": [*good, NamedWeight(name, last.tensor[:-1])],
    }[fault]


def refused_weights(
    rank: Rank, *, setup: EngineSetup, stream: list[NamedWeight]
) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
    """The refusal's sentence, and the weights around it."""
    engine = rank.cached_engine(setup)
    before = collect_weights(engine)
    with pytest.raises(WeightError) as caught:
        engine.load_weights(iter(stream))
    return str(caught.value), before, collect_weights(engine)


def test_weights_are_readable_only_inside_the_context(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    engine_under_test.run(read_outside, setup=oracle.make_setup(QWEN2_GROUPED))


def read_outside(rank: Rank, *, setup: EngineSetup) -> None:
    """Before, after, and a second time."""
    engine = rank.cached_engine(setup)
    stream = engine.export_weights()
    with pytest.raises(EngineStateError, match="inside"):
        next(stream)
    with stream:
        first = next(stream)
    with pytest.raises(EngineStateError, match="inside"):
        next(stream)
    assert bool(first.tensor.isfinite().all()), "a tensor does not outlive its stream"
    with pytest.raises(EngineStateError, match="again"), stream:
        pass


def test_exported_weights_equal_master_weights(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    setup, batch = oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW), oracle.get_batch()
    weights, update = engine_under_test.run(weights_and_update, setup=setup, batch=batch)[0]
    assert_all_equal(
        weights, as_exported(update.masters, weights, engine_under_test), what="weights"
    )


def weights_and_update(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch
) -> tuple[dict[str, Tensor], Update]:
    """Of one engine after one update."""
    engine = rank.temporary_engine(setup)
    update = train_once(engine, batch)
    return collect_weights(engine), update


@pytest.mark.bitwise
def test_portable_state_continues_bitwise(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW)
    batches = [oracle.get_batch(seed=seed) for seed in range(2)]
    for carried, continued in engine_under_test.run(continued_twice, setup=setup, batches=batches):
        assert_same_state(carried.state, continued.state)
        assert carried.grad_norm == continued.grad_norm


def continued_twice(
    rank: Rank, *, setup: EngineSetup, batches: list[SequenceBatch]
) -> tuple[Update, Update]:
    """A second update in an engine that got the state, and in the one that gave it."""
    giver, taker = rank.temporary_engine(setup), rank.temporary_engine(setup)
    train_once(giver, batches[0])
    taker.load_state(iter(list(giver.export_state())))
    return train_once(taker, batches[1]), train_once(giver, batches[1])


def test_oracle_continues_from_portable_state(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    # The oracle goes on where the engine stopped, and agrees about the gradient there.
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW)
    batches = [oracle.get_batch(seed=seed) for seed in range(2)]
    state, second = engine_under_test.run(state_and_next_update, setup=setup, batches=batches)[0]
    expected = oracle.run(update_from_state, setup=setup, state=state, batch=batches[1])
    assert_close(
        second.grad_norm, expected.grad_norm, LOGPROB, what="gradient norm of the next update"
    )


def state_and_next_update(
    rank: Rank, *, setup: EngineSetup, batches: list[SequenceBatch]
) -> tuple[dict[str, TrainingState], Update]:
    """State after the first update, and the second update."""
    engine = rank.temporary_engine(setup)
    first = train_once(engine, batches[0])
    return dict(first.state), train_once(engine, batches[1])


def update_from_state(
    rank: Rank, *, setup: EngineSetup, state: dict[str, TrainingState], batch: SequenceBatch
) -> Update:
    """One update that begins at a given state."""
    engine = rank.temporary_engine(setup)
    engine.load_state(iter(state.values()))
    return train_once(engine, batch)


def test_incomplete_state_is_rejected(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    engine_under_test.run(load_incomplete_state, setup=oracle.make_setup(QWEN2_GROUPED))


def load_incomplete_state(rank: Rank, *, setup: EngineSetup) -> None:
    """One parameter lacks, one is unknown."""
    engine = rank.cached_engine(setup)
    state = list(engine.export_state())
    for wrong in (state[:-1], [*state, replace(state[-1], name="model.unknown")]):
        with pytest.raises(
            WeightError, match=state[-1].name if len(wrong) < len(state) else "model.unknown"
        ):
            engine.load_state(iter(wrong))


def test_export_does_not_disturb_training(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    expected = oracle.get_update(setup, ClippedPpoProbe(), batch)
    norms = engine_under_test.run(norm_with_an_export_between, setup=setup, batch=batch)
    for norm in norms:
        assert_close(norm, expected.grad_norm, LOGPROB, what="gradient norm")


def norm_with_an_export_between(rank: Rank, *, setup: EngineSetup, batch: SequenceBatch) -> float:
    """Backward, export, step."""
    engine = rank.cached_engine(setup)
    engine.set_loss_fn(ClippedPpoProbe())
    with engine.train_mode():
        engine.forward_backward_batch(
            rank_slice(engine, batch, split=ONE_MICRO_BATCH), forward_only=False
        )
    collect_weights(engine)
    return engine.optimizer_step()
