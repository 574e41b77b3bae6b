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
from temper_engine_api.conformance.harness.engine_under_test import Subject
from temper_engine_api.conformance.harness.measurements import (
    WHOLE,
    Update,
    share_of,
    state_of,
    update_once,
    weights_of,
)
from temper_engine_api.conformance.harness.rank import TRAINS, Rank, Recipe
from temper_engine_api.conformance.harness.tolerances import (
    LOGPROB,
    assert_all_equal,
    assert_close,
    assert_same_state,
)
from temper_engine_api.conformance.inputs.probes import TokenProbe
from temper_engine_api.conformance.inputs.tiny_models import (
    LANGUAGE_MODELS,
    QWEN2_GROUPED,
    QWEN2_TIED,
    QWEN2_UNTIED,
    VALUE,
    TinyModel,
)
from temper_engine_api.conformance.oracle.oracle_cache import Reference
from temper_engine_api.engine import BaseEngine
from temper_engine_api.errors import EngineStateError, WeightError
from temper_engine_api.objective import HeadOutput
from temper_engine_api.outputs import ForwardOutputs
from temper_engine_api.weights import NamedWeight, TrainingState

MODELS = (
    *LANGUAGE_MODELS,
    pytest.param(VALUE, marks=pytest.mark.claims(Capability.VALUE_MODEL)),
)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_exported_weights_are_those_of_the_index(
    subject: Subject, reference: Reference, model: TinyModel
) -> None:
    recipe = reference.recipe(model)
    on_disk = load_file(Path(recipe.model_path) / "model.safetensors")
    of_ranks = subject.run(kept_weights, recipe=recipe)
    for exported in of_ranks:
        assert_all_equal(exported, as_exported(on_disk, exported, subject), what="weights")
        assert list(exported) == list(of_ranks[0]), "the order differs between ranks"


def as_exported(
    expected: dict[str, Tensor], exported: dict[str, Tensor], subject: Subject
) -> dict[str, Tensor]:
    """Where an engine computes in bf16 it may export that; else the bits of the master weights."""
    if subject.fleet.compute != "bf16":
        return expected
    return {
        name: tensor.bfloat16() if exported[name].dtype == torch.bfloat16 else tensor
        for name, tensor in expected.items()
    }


def kept_weights(rank: Rank, *, recipe: Recipe) -> dict[str, Tensor]:
    """In the order of the stream."""
    return weights_of(rank.kept_engine(recipe))


@pytest.mark.parametrize("model", LANGUAGE_MODELS, ids=lambda model: model.name)
def test_exported_weights_give_same_logits_in_transformers(
    subject: Subject, reference: Reference, model: TinyModel, tmp_path: Path
) -> None:
    # After an update, so that a stale copy shows; loaded by transformers itself, which names what is missing or unexpected.
    recipe, batch = reference.recipe(model, optimizer=TRAINS), reference.batch(model=model)
    exported, outputs = subject.run(
        weights_and_outputs_after_an_update, recipe=recipe, batch=batch
    )[0]
    folder = write_directory(exported, like=Path(recipe.model_path), folder=tmp_path / "exported")
    _, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not loading["unexpected_keys"]
    assert set(loading["missing_keys"]) <= ({"lm_head.weight"} if is_tied(model) else set())
    expected = reference.outputs(Recipe(model_path=str(folder)), batch, HeadOutput.LOGPROB)
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
    rank: Rank, *, recipe: Recipe, batch: SequenceBatch
) -> tuple[dict[str, Tensor], ForwardOutputs]:
    """What is exported and what the engine itself computes with it."""
    engine = rank.engine(recipe)
    train_once(engine, batch)
    with engine.eval_mode():
        share = share_of(engine, batch, split=WHOLE)
        result = engine.forward_backward_batch(
            share, forward_only=True, outputs=[HeadOutput.LOGPROB]
        )
    return weights_of(engine), engine.unshard_outputs(result.outputs, sample_ids=batch.sample_ids)


def train_once(engine: BaseEngine, batch: SequenceBatch) -> Update:
    engine.set_loss_fn(TokenProbe())
    return update_once(engine, [share_of(engine, batch, split=WHOLE)])


@pytest.mark.parametrize("model", [QWEN2_TIED, QWEN2_UNTIED], ids=lambda model: model.name)
def test_loaded_weights_come_out_again_bit_for_bit(
    subject: Subject, reference: Reference, model: TinyModel
) -> None:
    recipe = reference.recipe(model)
    other = load_file(reference.directory_of(model, seed=1) / "model.safetensors")
    weights, masters = subject.run(weights_after_loading, recipe=recipe, weights=other)[0]
    assert_all_equal(weights, as_exported(other, weights, subject), what="weights")
    assert_all_equal(masters, other, what="master weights")


def weights_after_loading(
    rank: Rank, *, recipe: Recipe, weights: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Exported weights, and master weights."""
    engine = rank.engine(recipe)
    engine.load_weights(NamedWeight(name, tensor) for name, tensor in weights.items())
    return weights_of(engine), {name: state.master for name, state in state_of(engine).items()}


def test_loaded_weights_are_the_ones_that_are_used(subject: Subject, reference: Reference) -> None:
    recipe, batch = reference.recipe(QWEN2_GROUPED), reference.batch()
    other = reference.directory_of(QWEN2_GROUPED, seed=1)
    expected = reference.outputs(replace(recipe, model_path=str(other)), batch, HeadOutput.LOGPROB)
    weights = load_file(other / "model.safetensors")
    outputs = subject.run(outputs_after_loading, recipe=recipe, weights=weights, batch=batch)[0]
    assert_close(outputs.columns[HeadOutput.LOGPROB], expected, LOGPROB, what="log-probs")


def outputs_after_loading(
    rank: Rank, *, recipe: Recipe, weights: dict[str, Tensor], batch: SequenceBatch
) -> ForwardOutputs:
    """In an engine of its own."""
    engine = rank.engine(recipe)
    engine.load_weights(NamedWeight(name, tensor) for name, tensor in weights.items())
    with engine.eval_mode():
        share = share_of(engine, batch, split=WHOLE)
        result = engine.forward_backward_batch(
            share, forward_only=True, outputs=[HeadOutput.LOGPROB]
        )
    return engine.unshard_outputs(result.outputs, sample_ids=batch.sample_ids)


@pytest.mark.parametrize("fault", ["missing", "unexpected", "repeated", "misshapen"])
def test_wrong_weights_are_refused_and_nothing_changes(
    subject: Subject, reference: Reference, fault: str
) -> None:
    recipe = reference.recipe(QWEN2_GROUPED)
    other = load_file(reference.directory_of(QWEN2_GROUPED, seed=1) / "model.safetensors")
    for message, before, after in subject.run(
        refused_weights, recipe=recipe, stream=spoilt(other, fault)
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
    rank: Rank, *, recipe: Recipe, stream: list[NamedWeight]
) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
    """The refusal's sentence, and the weights around it."""
    engine = rank.kept_engine(recipe)
    before = weights_of(engine)
    with pytest.raises(WeightError) as caught:
        engine.load_weights(iter(stream))
    return str(caught.value), before, weights_of(engine)


def test_weights_are_read_inside_the_with_only(subject: Subject, reference: Reference) -> None:
    subject.run(read_outside, recipe=reference.recipe(QWEN2_GROUPED))


def read_outside(rank: Rank, *, recipe: Recipe) -> None:
    """Before, after, and a second time."""
    engine = rank.kept_engine(recipe)
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


def test_masters_are_the_exported_weights(subject: Subject, reference: Reference) -> None:
    recipe, batch = reference.recipe(QWEN2_GROUPED, optimizer=TRAINS), reference.batch()
    weights, update = subject.run(weights_and_update, recipe=recipe, batch=batch)[0]
    assert_all_equal(weights, as_exported(update.masters, weights, subject), what="weights")


def weights_and_update(
    rank: Rank, *, recipe: Recipe, batch: SequenceBatch
) -> tuple[dict[str, Tensor], Update]:
    """Of one engine after one update."""
    engine = rank.engine(recipe)
    update = train_once(engine, batch)
    return weights_of(engine), update


@pytest.mark.bitwise
def test_portable_state_continues_bitwise(subject: Subject, reference: Reference) -> None:
    recipe = reference.recipe(QWEN2_GROUPED, optimizer=TRAINS)
    batches = [reference.batch(seed=seed) for seed in range(2)]
    for carried, continued in subject.run(continued_twice, recipe=recipe, batches=batches):
        assert_same_state(carried.state, continued.state)
        assert carried.grad_norm == continued.grad_norm


def continued_twice(
    rank: Rank, *, recipe: Recipe, batches: list[SequenceBatch]
) -> tuple[Update, Update]:
    """A second update in an engine that got the state, and in the one that gave it."""
    giver, taker = rank.engine(recipe), rank.engine(recipe)
    train_once(giver, batches[0])
    taker.load_state(iter(list(giver.export_state())))
    return train_once(taker, batches[1]), train_once(giver, batches[1])


def test_portable_state_equals_the_oracles(subject: Subject, reference: Reference) -> None:
    # The oracle goes on where the engine stopped, and agrees about the gradient there.
    recipe = reference.recipe(QWEN2_GROUPED, optimizer=TRAINS)
    batches = [reference.batch(seed=seed) for seed in range(2)]
    state, second = subject.run(state_and_next_update, recipe=recipe, batches=batches)[0]
    expected = reference.run(update_from_state, recipe=recipe, state=state, batch=batches[1])
    assert_close(
        second.grad_norm, expected.grad_norm, LOGPROB, what="gradient norm of the next update"
    )


def state_and_next_update(
    rank: Rank, *, recipe: Recipe, batches: list[SequenceBatch]
) -> tuple[dict[str, TrainingState], Update]:
    """State after the first update, and the second update."""
    engine = rank.engine(recipe)
    first = train_once(engine, batches[0])
    return dict(first.state), train_once(engine, batches[1])


def update_from_state(
    rank: Rank, *, recipe: Recipe, state: dict[str, TrainingState], batch: SequenceBatch
) -> Update:
    """One update that begins at a given state."""
    engine = rank.engine(recipe)
    engine.load_state(iter(state.values()))
    return train_once(engine, batch)


def test_incomplete_state_is_refused(subject: Subject, reference: Reference) -> None:
    subject.run(load_incomplete_state, recipe=reference.recipe(QWEN2_GROUPED))


def load_incomplete_state(rank: Rank, *, recipe: Recipe) -> None:
    """One parameter lacks, one is unknown."""
    engine = rank.kept_engine(recipe)
    state = list(engine.export_state())
    for wrong in (state[:-1], [*state, replace(state[-1], name="model.unknown")]):
        with pytest.raises(
            WeightError, match=state[-1].name if len(wrong) < len(state) else "model.unknown"
        ):
            engine.load_state(iter(wrong))


def test_export_does_not_disturb_training(subject: Subject, reference: Reference) -> None:
    recipe, batch = reference.recipe(QWEN2_GROUPED), reference.batch()
    expected = reference.update(recipe, TokenProbe(), batch)
    norms = subject.run(norm_with_an_export_between, recipe=recipe, batch=batch)
    for norm in norms:
        assert_close(norm, expected.grad_norm, LOGPROB, what="gradient norm")


def norm_with_an_export_between(rank: Rank, *, recipe: Recipe, batch: SequenceBatch) -> float:
    """Backward, export, step."""
    engine = rank.kept_engine(recipe)
    engine.set_loss_fn(TokenProbe())
    with engine.train_mode():
        engine.forward_backward_batch(share_of(engine, batch, split=WHOLE), forward_only=False)
    weights_of(engine)
    return engine.optimizer_step()
