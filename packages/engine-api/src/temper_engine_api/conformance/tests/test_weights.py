"""Conformance tests of weights: export, load, and the portable state."""

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
    BF16,
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
from temper_engine_api.specs import Compute
from temper_engine_api.weights import NamedWeight, TrainingState

MODELS = (
    *LANGUAGE_MODELS,
    pytest.param(VALUE, marks=pytest.mark.if_claimed(Capability.VALUE_MODEL)),
)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_exported_weights_equal_the_loaded_files(
    engine_under_test: EngineUnderTest, oracle: OracleCache, model: TinyModel
) -> None:
    """Exported names and tensors equal model.safetensors, in the same order on every rank.

    A tied head must not be exported as a separate tensor.
    """
    setup = oracle.make_setup(model)
    on_disk = load_file(Path(setup.model_path) / "model.safetensors")
    exports = engine_under_test.run(export_weights, setup=setup)
    for exported in exports:
        assert_all_equal(
            exported, cast_like_export(on_disk, exported, engine_under_test), quantity="weights"
        )
        assert list(exported) == list(exports[0]), "the ranks export weights in different orders"


def cast_like_export(
    expected: dict[str, Tensor], exported: dict[str, Tensor], engine_under_test: EngineUnderTest
) -> dict[str, Tensor]:
    """Cast expected tensors to bf16 where an engine with bf16 compute exports bf16."""
    if engine_under_test.rank_pool.compute != "bf16":
        return expected
    return {
        name: tensor.bfloat16() if exported[name].dtype == torch.bfloat16 else tensor
        for name, tensor in expected.items()
    }


def export_weights(rank: Rank, *, setup: EngineSetup) -> dict[str, Tensor]:
    """Return the exported weights in stream order."""
    return collect_weights(rank.cached_engine(setup))


@pytest.mark.parametrize("model", LANGUAGE_MODELS, ids=lambda model: model.name)
def test_exported_weights_give_same_logits_in_transformers(
    engine_under_test: EngineUnderTest, oracle: OracleCache, model: TinyModel, tmp_path: Path
) -> None:
    """Transformers loads the weights of a trained engine and computes the same log-probs.

    The export follows an update, so a stale copy shows. transformers reports missing and unexpected
    names.
    """
    setup, batch = oracle.make_setup(model, optimizer=ADAMW), oracle.get_batch(model=model)
    exported, outputs = engine_under_test.run(
        weights_and_outputs_after_an_update, setup=setup, batch=batch
    )[0]
    folder = write_model_folder(exported, like=Path(setup.model_path), folder=tmp_path / "exported")
    _, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not loading["unexpected_keys"]
    # The file of a tied model rightly lacks the head, which transformers may report.
    assert set(loading["missing_keys"]) <= ({"lm_head.weight"} if is_tied(model) else set())
    expected = oracle.get_outputs(EngineSetup(model_path=str(folder)), batch, HeadOutput.LOGPROB)
    assert_close(
        outputs.columns[HeadOutput.LOGPROB],
        expected,
        LOGPROB,
        quantity="log-probs",
        batch=batch,
        num_ranks=engine_under_test.num_data_ranks,
    )


def is_tied(model: TinyModel) -> bool:
    return bool(model.architecture["tie_word_embeddings"])


def write_model_folder(weights: dict[str, Tensor], *, like: Path, folder: Path) -> Path:
    folder.mkdir()
    shutil.copy(like / "config.json", folder)
    save_file(
        # safetensors rejects tensors that are not contiguous.
        {name: tensor.contiguous() for name, tensor in weights.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return folder


def weights_and_outputs_after_an_update(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch
) -> tuple[dict[str, Tensor], ForwardOutputs]:
    """Return exported weights and the engine's own log-probs after one update.

    An evaluation before the update shows an engine that evaluates with the weights of the first.
    """
    engine = rank.temporary_engine(setup)
    evaluate(engine, batch)
    train_once(engine, batch)
    outputs = evaluate(engine, batch)
    return collect_weights(engine), outputs


def evaluate(engine: BaseEngine, batch: SequenceBatch) -> ForwardOutputs:
    """Return log-probs in batch order."""
    with engine.eval_mode():
        result = engine.forward_backward_batch(
            rank_slice(engine, batch, split=ONE_MICRO_BATCH),
            forward_only=True,
            outputs=[HeadOutput.LOGPROB],
        )
    return engine.unshard_outputs(result.outputs, sample_ids=batch.sample_ids)


def train_once(engine: BaseEngine, batch: SequenceBatch) -> Update:
    engine.set_loss_fn(ClippedPpoProbe())
    return run_update(engine, [rank_slice(engine, batch, split=ONE_MICRO_BATCH)])


@pytest.mark.parametrize("model", [QWEN2_TIED, QWEN2_UNTIED], ids=lambda model: model.name)
def test_loaded_weights_are_exported_unchanged(
    engine_under_test: EngineUnderTest, oracle: OracleCache, model: TinyModel
) -> None:
    """`load_weights` followed by export returns the same bits, in master weights too."""
    setup = oracle.make_setup(model)
    # Load other weights than the engine started with, so that a load without effect fails.
    other = load_file(oracle.write_model(model, seed=1) / "model.safetensors")
    weights, masters = engine_under_test.run(weights_after_loading, setup=setup, weights=other)[0]
    assert_all_equal(
        weights, cast_like_export(other, weights, engine_under_test), quantity="weights"
    )
    assert_all_equal(masters, other, quantity="master weights")


def weights_after_loading(
    rank: Rank, *, setup: EngineSetup, weights: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Load weights; return exported and master weights."""
    engine = rank.temporary_engine(setup)
    engine.load_weights(NamedWeight(name, tensor) for name, tensor in weights.items())
    return collect_weights(engine), {
        name: state.master for name, state in collect_state(engine).items()
    }


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_loaded_weights_are_used(
    engine_under_test: EngineUnderTest, oracle: OracleCache, compute: Compute
) -> None:
    """Forward passes after `load_weights` use the new weights, also from a copy in bf16."""
    setup, batch = oracle.make_setup(QWEN2_GROUPED, compute=compute), oracle.get_batch()
    other = oracle.write_model(QWEN2_GROUPED, seed=1)
    expected = oracle.get_outputs(replace(setup, model_path=str(other)), batch, HeadOutput.LOGPROB)
    weights = load_file(other / "model.safetensors")
    outputs = engine_under_test.run(
        outputs_after_loading, setup=setup, weights=weights, batch=batch
    )[0]
    assert_close(
        outputs.columns[HeadOutput.LOGPROB],
        expected,
        BF16 if compute == "bf16" else LOGPROB,
        quantity="log-probs",
        batch=batch,
        num_ranks=engine_under_test.num_data_ranks,
    )


def outputs_after_loading(
    rank: Rank, *, setup: EngineSetup, weights: dict[str, Tensor], batch: SequenceBatch
) -> ForwardOutputs:
    """Evaluate, load weights, and return the log-probs of a second evaluation."""
    engine = rank.temporary_engine(setup)
    evaluate(engine, batch)
    engine.load_weights(NamedWeight(name, tensor) for name, tensor in weights.items())
    return evaluate(engine, batch)


@pytest.mark.parametrize("defect", ["missing", "unexpected", "repeated", "misshapen"])
def test_invalid_weights_are_rejected_without_changes(
    engine_under_test: EngineUnderTest, oracle: OracleCache, defect: str
) -> None:
    """A bad stream raises WeightError naming the weight, and no weight changes.

    The defect is the last tensor, so an engine that writes while it reads has changed the others
    already.
    """
    setup = oracle.make_setup(QWEN2_GROUPED)
    other = load_file(oracle.write_model(QWEN2_GROUPED, seed=1) / "model.safetensors")
    for message, before, after in engine_under_test.run(
        load_invalid_weights, setup=setup, stream=make_invalid_stream(other, defect)
    ):
        assert "model.norm.weight" in message or "twice" in message
        assert_all_equal(after, before, quantity="weights")


def make_invalid_stream(weights: dict[str, Tensor], defect: str) -> list[NamedWeight]:
    """Build a weight stream whose last entries have the defect."""
    name = "model.norm.weight"
    good = [NamedWeight(n, tensor) for n, tensor in weights.items() if n != name]
    last = NamedWeight(name, weights[name])
    return {
        "missing": good,
        "unexpected": [*good, last, NamedWeight("model.norm.weight.extra", last.tensor)],
        "repeated": [*good, last, last],
        "misshapen": [*good, NamedWeight(name, last.tensor[:-1])],
    }[defect]


def load_invalid_weights(
    rank: Rank, *, setup: EngineSetup, stream: list[NamedWeight]
) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
    """Return the error message, and the weights before and after."""
    engine = rank.cached_engine(setup)
    before = collect_weights(engine)
    with pytest.raises(WeightError) as caught:
        engine.load_weights(iter(stream))
    return str(caught.value), before, collect_weights(engine)


def test_weights_are_readable_only_inside_the_context(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """`export_weights` is readable once, inside its `with` block; tensors outlive it."""
    engine_under_test.run(read_outside, setup=oracle.make_setup(QWEN2_GROUPED))


def read_outside(rank: Rank, *, setup: EngineSetup) -> None:
    """Read before, after and a second time; each must raise EngineStateError."""
    engine = rank.cached_engine(setup)
    stream = engine.export_weights()
    with pytest.raises(EngineStateError, match="inside"):
        next(stream)
    with stream:
        # Read only one tensor: the context may be left before the stream ends.
        first = next(stream)
    with pytest.raises(EngineStateError, match="inside"):
        next(stream)
    assert bool(first.tensor.isfinite().all()), (
        "an exported tensor must stay valid after its stream is closed"
    )
    with pytest.raises(EngineStateError, match="again"), stream:
        pass


def test_exported_weights_equal_master_weights(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Exported weights equal the master weights of the portable state."""
    setup, batch = oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW), oracle.get_batch()
    weights, update = engine_under_test.run(export_weights_and_update, setup=setup, batch=batch)[0]
    assert_all_equal(
        weights, cast_like_export(update.masters, weights, engine_under_test), quantity="weights"
    )


def export_weights_and_update(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch
) -> tuple[dict[str, Tensor], Update]:
    """Return exported weights and the update of a temporary engine."""
    engine = rank.temporary_engine(setup)
    update = train_once(engine, batch)
    return collect_weights(engine), update


def test_exported_weights_stay_valid_after_the_next_update(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Check that an update does not change the tensors exported before it."""
    setup, batch = oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW), oracle.get_batch()
    for copies, kept, later in engine_under_test.run(
        export_weights_around_an_update, setup=setup, batch=batch
    ):
        assert_all_equal(kept, copies, quantity="weights exported before the update")
        assert any(not torch.equal(later[name], copies[name]) for name in copies)


def export_weights_around_an_update(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return copies of exported tensors, these tensors after an update, and a new export."""
    engine = rank.temporary_engine(setup)
    with engine.export_weights() as stream:
        kept = dict(stream)
    copies = {name: tensor.cpu().clone() for name, tensor in kept.items()}
    train_once(engine, batch)
    return copies, {name: tensor.cpu() for name, tensor in kept.items()}, collect_weights(engine)


@pytest.mark.bitwise
def test_portable_state_continues_bitwise(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """An engine that loads another one's portable state makes the same next update bit for bit."""
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW)
    batches = [oracle.get_batch(seed=seed) for seed in range(2)]
    for target_update, source_update in engine_under_test.run(
        continue_in_both_engines, setup=setup, batches=batches
    ):
        assert_same_state(target_update.state, source_update.state)
        assert target_update.grad_norm == source_update.grad_norm


def continue_in_both_engines(
    rank: Rank, *, setup: EngineSetup, batches: list[SequenceBatch]
) -> tuple[Update, Update]:
    """Update the source, move its state to the target, then update both."""
    source, target = rank.temporary_engine(setup), rank.temporary_engine(setup)
    train_once(source, batches[0])
    # The export is lazy and may run collectives: finish it before the load runs its own.
    target.load_state(iter(list(source.export_state())))
    return train_once(target, batches[1]), train_once(source, batches[1])


def test_oracle_continues_from_portable_state(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """The oracle loads the engine's state and computes the same next gradient norm."""
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW)
    batches = [oracle.get_batch(seed=seed) for seed in range(2)]
    state, second = engine_under_test.run(state_and_next_update, setup=setup, batches=batches)[0]
    expected = oracle.run(update_from_state, setup=setup, state=state, batch=batches[1])
    assert_close(
        second.grad_norm, expected.grad_norm, LOGPROB, quantity="gradient norm of the next update"
    )


def state_and_next_update(
    rank: Rank, *, setup: EngineSetup, batches: list[SequenceBatch]
) -> tuple[dict[str, TrainingState], Update]:
    """Return the state after the first update, and the second update."""
    engine = rank.temporary_engine(setup)
    first = train_once(engine, batches[0])
    return dict(first.state), train_once(engine, batches[1])


def update_from_state(
    rank: Rank, *, setup: EngineSetup, state: dict[str, TrainingState], batch: SequenceBatch
) -> Update:
    """Load a state, then run one update."""
    engine = rank.temporary_engine(setup)
    engine.load_state(iter(state.values()))
    return train_once(engine, batch)


def test_incomplete_state_is_rejected(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """`load_state` raises WeightError naming a missing or unknown parameter; nothing changes."""
    engine_under_test.run(load_incomplete_state, setup=oracle.make_setup(QWEN2_GROUPED))


def load_incomplete_state(rank: Rank, *, setup: EngineSetup) -> None:
    """Load a state without its last entry, and one with an unknown entry."""
    engine = rank.cached_engine(setup)
    with engine.export_state() as stream:
        state = list(stream)
    before = collect_state(engine)
    for invalid in (state[:-1], [*state, replace(state[-1], name="model.unknown")]):
        with pytest.raises(
            WeightError, match=state[-1].name if len(invalid) < len(state) else "model.unknown"
        ):
            engine.load_state(replace(each, master=each.master + 1.0) for each in invalid)
        assert_same_state(collect_state(engine), before)


def test_export_does_not_disturb_training(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Exporting weights between backward and step does not change the gradient."""
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    expected = oracle.get_update(setup, ClippedPpoProbe(), batch)
    norms = engine_under_test.run(norm_with_an_export_between, setup=setup, batch=batch)
    for norm in norms:
        assert_close(norm, expected.grad_norm, LOGPROB, quantity="gradient norm")


def norm_with_an_export_between(rank: Rank, *, setup: EngineSetup, batch: SequenceBatch) -> float:
    """Run backward, export, step; return the gradient norm."""
    engine = rank.cached_engine(setup)
    engine.set_loss_fn(ClippedPpoProbe())
    with engine.train_mode():
        engine.forward_backward_batch(
            rank_slice(engine, batch, split=ONE_MICRO_BATCH), forward_only=False
        )
    collect_weights(engine)
    return engine.optimizer_step()
