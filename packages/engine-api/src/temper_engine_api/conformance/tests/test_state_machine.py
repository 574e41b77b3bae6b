"""Laws: calls in an order that has no meaning are refused, and the RFC's loop runs as it is written."""

from dataclasses import replace

import pytest
import torch

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.conformance.harness.engine_under_test import Subject
from temper_engine_api.conformance.harness.measurements import (
    WHOLE,
    Interrupted,
    Update,
    interrupted_training,
    measure_update,
    share_of,
    update_once,
)
from temper_engine_api.conformance.harness.rank import TRAINS, Rank, Recipe
from temper_engine_api.conformance.harness.tolerances import (
    GRADIENT,
    LOGPROB,
    assert_all_close,
    assert_close,
    assert_same_state,
)
from temper_engine_api.conformance.inputs.probes import TokenProbe
from temper_engine_api.conformance.inputs.tiny_models import QWEN2_GROUPED
from temper_engine_api.conformance.oracle.oracle_cache import Reference
from temper_engine_api.engine import BaseEngine
from temper_engine_api.errors import ConfigError, EngineStateError
from temper_engine_api.objective import HeadOutput


def test_calls_in_a_meaningless_order_are_refused(subject: Subject, reference: Reference) -> None:
    subject.run(call_out_of_order, recipe=reference.recipe(QWEN2_GROUPED), batch=reference.batch())


def call_out_of_order(rank: Rank, *, recipe: Recipe, batch: SequenceBatch) -> None:
    """Each in turn; every refusal leaves an engine that still works, which the update at the end shows."""
    engine = rank.engine(recipe)
    share = share_of(engine, batch, split=WHOLE)
    with engine.train_mode(), pytest.raises(EngineStateError, match="Objective"):
        engine.forward_backward_batch(share, forward_only=False)
    engine.set_loss_fn(TokenProbe())
    with pytest.raises(EngineStateError, match="train_mode"):
        engine.forward_backward_batch(share, forward_only=False)
    with pytest.raises(EngineStateError, match="eval_mode"):
        engine.forward_backward_batch(share, forward_only=True)
    with engine.eval_mode(), pytest.raises(EngineStateError, match="train_mode"):
        engine.forward_backward_batch(share, forward_only=False)
    with engine.eval_mode(), pytest.raises(EngineStateError, match="leave"), engine.train_mode():
        pass
    with engine.train_mode(), pytest.raises(EngineStateError, match="advantages"):
        engine.forward_backward_batch(replace(share, columns={}), forward_only=False)
    with pytest.raises(EngineStateError, match="no gradients"):
        engine.optimizer_step()
    assert update_once(engine, [share]).report.outcome == "stepped"


def test_a_second_final_call_is_refused(subject: Subject, reference: Reference) -> None:
    subject.run(call_after_final, recipe=reference.recipe(QWEN2_GROUPED), batch=reference.batch())


def call_after_final(rank: Rank, *, recipe: Recipe, batch: SequenceBatch) -> None:
    """Before the step, and after it until gradients are zeroed."""
    engine = rank.kept_engine(recipe)
    engine.set_loss_fn(TokenProbe())
    share = share_of(engine, batch, split=WHOLE)
    with engine.train_mode():
        engine.forward_backward_batch(share, forward_only=False)
        for is_final in (True, False):
            with pytest.raises(EngineStateError, match="optimizer_zero_grad"):
                engine.forward_backward_batch(share, forward_only=False, final=is_final)
    engine.optimizer_step()
    with engine.train_mode(), pytest.raises(EngineStateError, match="optimizer_zero_grad"):
        engine.forward_backward_batch(share, forward_only=False)
    with pytest.raises(EngineStateError, match="no gradients"):
        engine.optimizer_step()


def test_a_step_on_zeroed_gradients_is_refused(subject: Subject, reference: Reference) -> None:
    subject.run(step_after_zeroing, recipe=reference.recipe(QWEN2_GROUPED), batch=reference.batch())


def step_after_zeroing(rank: Rank, *, recipe: Recipe, batch: SequenceBatch) -> None:
    """Gradients were there, and were dropped."""
    engine = rank.kept_engine(recipe)
    engine.set_loss_fn(TokenProbe())
    with engine.train_mode():
        engine.forward_backward_batch(share_of(engine, batch, split=WHOLE), forward_only=False)
    engine.optimizer_zero_grad()
    with pytest.raises(EngineStateError, match="no gradients"):
        engine.optimizer_step()


def test_an_engine_without_optimizer_evaluates_and_refuses_to_train(
    subject: Subject, reference: Reference
) -> None:
    recipe, batch = reference.recipe(QWEN2_GROUPED, optimizer=None), reference.batch()
    expected = reference.outputs(reference.recipe(QWEN2_GROUPED), batch, HeadOutput.LOGPROB)
    for column in subject.run(evaluate_frozen, recipe=recipe, batch=batch):
        assert_close(column, expected, LOGPROB, what="log-probs")


def evaluate_frozen(rank: Rank, *, recipe: Recipe, batch: SequenceBatch) -> torch.Tensor:
    """Log-probs, after every way to train was refused."""
    engine = rank.engine(recipe)
    engine.set_loss_fn(TokenProbe())
    share = share_of(engine, batch, split=WHOLE)
    with engine.train_mode(), pytest.raises(EngineStateError, match="optimiser"):
        engine.forward_backward_batch(share, forward_only=False)
    with pytest.raises(EngineStateError, match="optimiser"):
        engine.optimizer_step()
    assert engine.current_lr == 0.0
    with engine.eval_mode():
        result = engine.forward_backward_batch(
            share, forward_only=True, outputs=[HeadOutput.LOGPROB]
        )
    return engine.unshard_outputs(result.outputs, sample_ids=batch.sample_ids).columns[
        HeadOutput.LOGPROB
    ]


def test_modes_end_when_their_body_raises(subject: Subject, reference: Reference) -> None:
    recipe, batch = reference.recipe(QWEN2_GROUPED), reference.batch()
    expected = reference.update(recipe, TokenProbe(), batch)
    gradients = subject.run(update_after_interruptions, recipe=recipe, batch=batch)[0]
    assert_all_close(gradients, expected.gradients, GRADIENT, what="gradient")


def update_after_interruptions(
    rank: Rank, *, recipe: Recipe, batch: SequenceBatch
) -> dict[str, torch.Tensor]:
    """Bodies that raise before and after a backward pass, then one that does not."""
    engine = rank.kept_engine(recipe)
    engine.set_loss_fn(TokenProbe())
    share = share_of(engine, batch, split=WHOLE)
    with pytest.raises(Interrupted), engine.eval_mode():
        raise Interrupted
    for is_final in (False, True):
        engine.optimizer_zero_grad()
        with pytest.raises(Interrupted):
            interrupted_training(engine, share, is_final=is_final)
    return update_once(engine, [share]).gradients


def test_nothing_is_known_before_init_model(subject: Subject, reference: Reference) -> None:
    subject.run(use_before_init, recipe=reference.recipe(QWEN2_GROUPED))


def use_before_init(rank: Rank, *, recipe: Recipe) -> None:
    """Constructing reads no file: a path that does not exist is found out by ``init_model`` only."""
    with pytest.raises(EngineStateError, match="init_model"):
        _ = rank.unbuilt_engine(recipe).topology
    rank.unbuilt_engine(replace(recipe, model_path=recipe.model_path + "-that-does-not-exist"))
    with pytest.raises(ConfigError, match=rank.engine_class.config_class.__name__):
        rank.engine_class("not a configuration")  # type: ignore[arg-type]  # that is the question


@pytest.mark.bitwise
def test_a_second_engine_follows_a_closed_one(subject: Subject, reference: Reference) -> None:
    # Nothing of the first life is left in the second: the same update from the same weights gives the same bits.
    recipe, batch = reference.recipe(QWEN2_GROUPED, optimizer=TRAINS), reference.batch()
    for first, second in subject.run(two_lives, recipe=recipe, batch=batch):
        assert_same_state(second.state, first.state)
        assert second.grad_norm == first.grad_norm


def two_lives(rank: Rank, *, recipe: Recipe, batch: SequenceBatch) -> list[Update]:
    """Of an engine that is closed, and of the one after it."""
    updates = []
    for _ in range(2):
        engine: BaseEngine = rank.unbuilt_engine(recipe)
        engine.init_model()
        engine.set_loss_fn(TokenProbe())
        updates.append(update_once(engine, [share_of(engine, batch, split=WHOLE)]))
        engine.close()
    return updates


def test_the_kit_reads_gradients_as_they_are(subject: Subject, reference: Reference) -> None:
    # Reading changes no weight, so engines can be kept between laws.
    recipe, batch = reference.recipe(QWEN2_GROUPED), reference.batch()
    masters = reference.update(recipe, TokenProbe(), batch).masters
    update = subject.run(measure_update, recipe=recipe, objective=TokenProbe(), batch=batch)[0]
    assert_all_close(update.masters, masters, LOGPROB, what="weights")
    assert all(torch.equal(update.masters[name], master) for name, master in masters.items())
