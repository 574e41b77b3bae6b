"""Laws: calls in an order that has no meaning are refused, and the RFC's loop runs as it is written."""

from dataclasses import replace

import pytest
import torch

from temper_engine_api.batch import PackedBatch, SequenceBatch
from temper_engine_api.conformance.measure import WHOLE, Update, measure_update, share_of, update_once
from temper_engine_api.conformance.models import QWEN2_GROUPED
from temper_engine_api.conformance.probes import TokenProbe
from temper_engine_api.conformance.rank import Rank, Recipe
from temper_engine_api.conformance.reference import Reference
from temper_engine_api.conformance.rfc_loop import (
    LoopResult,
    MeanOfRankMeans,
    mean_cost,
    postprocess_fn,
    preprocess_fn,
    rfc_loop,
)
from temper_engine_api.conformance.subject import Subject
from temper_engine_api.conformance.test_update import TRAINS
from temper_engine_api.conformance.tolerances import (
    GRADIENT,
    LOGPROB,
    LOSS,
    LOSS_TERMS,
    UPDATE,
    assert_all_close,
    assert_close,
    assert_same_state,
)
from temper_engine_api.engine import BaseEngine
from temper_engine_api.errors import ConfigError, EngineStateError
from temper_engine_api.objective import Query
from temper_engine_api.specs import ScheduleSpec

FALLING = ScheduleSpec(kind="linear", total_steps=8)


class Interrupted(Exception):
    """Raised by a body."""


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


def test_an_engine_without_optimizer_evaluates_and_refuses_to_train(subject: Subject, reference: Reference) -> None:
    recipe, batch = reference.recipe(QWEN2_GROUPED, optimizer=None), reference.batch()
    expected = reference.outputs(reference.recipe(QWEN2_GROUPED), batch, Query.LOGPROB)
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
        result = engine.forward_backward_batch(share, forward_only=True, outputs=[Query.LOGPROB])
    return engine.unshard_outputs(result.outputs, sample_ids=batch.sample_ids).columns[Query.LOGPROB]


def test_modes_end_when_their_body_raises(subject: Subject, reference: Reference) -> None:
    recipe, batch = reference.recipe(QWEN2_GROUPED), reference.batch()
    expected = reference.update(recipe, TokenProbe(), batch)
    gradients = subject.run(update_after_interruptions, recipe=recipe, batch=batch)[0]
    assert_all_close(gradients, expected.gradients, GRADIENT, what="gradient")


def update_after_interruptions(rank: Rank, *, recipe: Recipe, batch: SequenceBatch) -> dict[str, torch.Tensor]:
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


def interrupted_training(engine: BaseEngine, share: PackedBatch, *, is_final: bool) -> None:
    """A backward pass, and then trouble."""
    with engine.train_mode():
        engine.forward_backward_batch(share, forward_only=False, final=is_final)
        raise Interrupted


def test_nothing_is_known_before_init_model(subject: Subject, reference: Reference) -> None:
    subject.run(use_before_init, recipe=reference.recipe(QWEN2_GROUPED))


def use_before_init(rank: Rank, *, recipe: Recipe) -> None:
    """Constructing reads no file: a path that does not exist is found out by ``init_model`` only."""
    with pytest.raises(EngineStateError, match="init_model"):
        _ = rank.unbuilt_engine(recipe).topology
    rank.unbuilt_engine(replace(recipe, model_path=recipe.model_path + "-that-does-not-exist"))
    with pytest.raises(ConfigError, match=rank.engine_class.config_class.__name__):
        rank.engine_class("not a configuration")  # type: ignore[arg-type]  # that is the question


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


def test_rfc_loop_with_a_callable(subject: Subject, reference: Reference) -> None:
    recipe = reference.recipe(QWEN2_GROUPED, optimizer=TRAINS, schedule=FALLING)
    batches = [reference.batch(seed=seed) for seed in range(3)]
    results = subject.run(
        rfc_loop,
        recipe=recipe,
        batches=batches,
        loss_fn=mean_cost,
        preprocess_fn=preprocess_fn,
        postprocess_fn=postprocess_fn,
    )
    expected = reference.run(
        rfc_loop,
        recipe=recipe,
        batches=batches,
        loss_fn=MeanOfRankMeans(subject.world_size),
        preprocess_fn=preprocess_fn,
        postprocess_fn=postprocess_fn,
    )
    assert_same_loop(results, expected)
    # Two hooks in each of three training calls and in one evaluation.
    assert {result.num_hook_calls for result in results} == {8}


def test_rfc_loop_with_an_objective(subject: Subject, reference: Reference) -> None:
    # Rows lie on other ranks than a plan would put them, and the loss is the same: the denominators are those of the whole mini-batch.
    recipe = reference.recipe(QWEN2_GROUPED, optimizer=TRAINS, schedule=FALLING)
    batches = [reference.batch(seed=seed) for seed in range(3)]
    results = subject.run(rfc_loop, recipe=recipe, batches=batches, loss_fn=TokenProbe())
    assert_same_loop(results, reference.run(rfc_loop, recipe=recipe, batches=batches, loss_fn=TokenProbe()))


def assert_same_loop(results: list[LoopResult], expected: LoopResult) -> None:
    """Losses and norms on every rank, and the weights at the end."""
    for result in results:
        for loss, want in zip(result.losses, expected.losses, strict=True):
            assert_close(loss, want, LOSS, what="loss", at_least=LOSS_TERMS)
        for norm, want in zip(result.grad_norms, expected.grad_norms, strict=True):
            assert_close(norm, want, UPDATE, what="gradient norm")
        assert result.rates == expected.rates
    masters = [{name: entry.master for name, entry in each.state.items()} for each in (results[0], expected)]
    assert_all_close(masters[0], masters[1], UPDATE, what="weights")


def test_rfc_predictions_are_detached_columns_of_the_call(subject: Subject, reference: Reference) -> None:
    recipe, batch = reference.recipe(QWEN2_GROUPED), reference.batch()
    logprobs = reference.outputs(recipe, batch, Query.LOGPROB)
    results = subject.run(rfc_loop, recipe=recipe, batches=[batch], loss_fn=TokenProbe())
    for index, result in enumerate(results):
        rows = range(index, batch.num_sequences, subject.world_size)
        mine = batch.with_columns({"expected": logprobs}).select(rows)
        if result.seen is None or result.evaluated is None:
            continue
        assert not result.seen.requires_grad
        assert_close(result.evaluated, mine.columns["expected"], LOGPROB, what="predictions, forward only")
        trained = torch.where(mine.loss_mask, mine.columns["expected"], 0.0)
        assert_close(result.seen, trained, LOGPROB, what="predictions in training")


def test_two_rfc_calls_add_up(subject: Subject, reference: Reference) -> None:
    # Calls before a step add up: the same call twice doubles the gradient.
    recipe, batch = reference.recipe(QWEN2_GROUPED), reference.batch()
    once, twice = (subject.run(gradients_of_rfc_calls, recipe=recipe, batch=batch, num_calls=n)[0] for n in (1, 2))
    assert_all_close(twice, {name: 2 * gradient for name, gradient in once.items()}, GRADIENT, what="gradient")


def gradients_of_rfc_calls(rank: Rank, *, recipe: Recipe, batch: SequenceBatch, num_calls: int) -> dict[str, torch.Tensor]:
    """Of a callable, called so many times before the step."""
    engine = rank.kept_engine(recipe)
    engine.set_loss_fn(mean_cost)
    rows = batch.select(range(rank.index, batch.num_sequences, rank.world_size))
    with engine.train_mode():
        for _ in range(num_calls):
            engine.forward_backward_step(rows, {"calls": 0}, postprocess_fn=postprocess_fn)
    engine.optimizer_step()
    return {entry.name: entry.first_moment for entry in engine.export_state()}


def test_the_kit_reads_gradients_as_they_are(subject: Subject, reference: Reference) -> None:
    # Reading changes no weight, so engines can be kept between laws.
    recipe, batch = reference.recipe(QWEN2_GROUPED), reference.batch()
    masters = reference.update(recipe, TokenProbe(), batch).masters
    update = subject.run(measure_update, recipe=recipe, objective=TokenProbe(), batch=batch)[0]
    assert_all_close(update.masters, masters, LOGPROB, what="weights")
    assert all(torch.equal(update.masters[name], master) for name, master in masters.items())
