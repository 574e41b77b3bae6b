"""Test the methods that BaseEngine implements, on an engine whose model is one table."""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import HashStore

from temper_engine_api.batch import PackedBatch, SequenceBatch, from_sequences
from temper_engine_api.capabilities import Capability
from temper_engine_api.distributed.rank_failures import RankFailures
from temper_engine_api.engine import BaseEngine
from temper_engine_api.errors import (
    BatchError,
    CapabilityError,
    CheckpointError,
    CollectiveTimeoutError,
    ConfigError,
    EngineStateError,
    WeightError,
)
from temper_engine_api.hooks import pack_single_micro_batch
from temper_engine_api.objective import HeadOutput, Objective
from temper_engine_api.padding import to_padded
from temper_engine_api.specs import (
    EngineConfig,
    LoraSpec,
    ModelSpec,
    OffloadSpec,
    OptimizerSpec,
    PrecisionSpec,
    ScheduleSpec,
)
from temper_engine_api.topology import PlanConstraints
from temper_engine_api.updates import LossScale
from temper_engine_api.weights import NamedWeight

MakeBatch = Callable[..., SequenceBatch]
MakeEngines = Callable[..., list[BaseEngine]]


def table_of(engine: BaseEngine) -> Tensor:
    with engine.export_weights() as stream:
        return next(stream).tensor


def update(engine: BaseEngine, *batches: PackedBatch) -> float:
    """Run one update with a call for each batch, of which the last is final."""
    engine.optimizer_zero_grad()
    with engine.train_mode():
        for i, batch in enumerate(batches):
            engine.forward_backward_batch(batch, forward_only=False, final=i == len(batches) - 1)
    return engine.optimizer_step()


def poisoned(batch: SequenceBatch) -> SequenceBatch:
    return batch.with_columns({"advantages": torch.full((batch.num_tokens,), torch.inf)})


def untrained(batch: SequenceBatch) -> SequenceBatch:
    return from_sequences(
        [batch.tokens],
        loss_masks=[torch.zeros_like(batch.loss_mask)],
        columns={"advantages": [batch.tokens.float()]},
    )


# Construction, properties and capabilities.


def test_the_topology_is_unknown_before_init_model(engine: BaseEngine) -> None:
    fresh = type(engine)(engine.config)
    with pytest.raises(EngineStateError, match=r"no topology yet: call init_model\(\)"):
        _ = fresh.topology


def test_another_engines_configuration_is_refused(engine: BaseEngine) -> None:
    with pytest.raises(ConfigError, match="got a EngineConfig, but needs a BigramConfig"):
        type(engine)(EngineConfig(model=ModelSpec(path="x")))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"lora": LoraSpec(rank=4, alpha=8.0)}, "adapter"),
        ({"offload": OffloadSpec(optimizer=True)}, "offload"),
        (
            {"model": ModelSpec(architecture={"model_type": "bigram"}, model_type="value_model")},
            "value_model",
        ),
    ],
)
def test_building_refuses_a_capability_that_is_not_claimed(
    make_engines: MakeEngines, settings: dict[str, object], named: str
) -> None:
    with pytest.raises(
        CapabilityError, match=f"BigramEngine does not offer '{named}'; it offers data_parallel"
    ):
        make_engines(**settings)


def test_adapter_calls_need_the_capability(engine: BaseEngine) -> None:
    for call in (
        engine.export_adapter,
        lambda: engine.load_adapter({}, {}),
        engine.disable_adapter().__enter__,
    ):
        with pytest.raises(CapabilityError, match=Capability.ADAPTER):
            call()


# Modes.


def test_a_pass_needs_its_mode(engine: BaseEngine, make_batch: MakeBatch) -> None:
    batch = engine.shard_data(make_batch([4, 5]), max_tokens=16)
    with pytest.raises(
        EngineStateError, match=r"a backward pass needs `with engine.train_mode\(\)`"
    ):
        engine.forward_backward_batch(batch, forward_only=False)
    with engine.eval_mode(), pytest.raises(EngineStateError, match="a backward pass needs"):
        engine.forward_backward_batch(batch, forward_only=False)
    with pytest.raises(EngineStateError, match="a forward pass needs"):
        engine.forward_backward_batch(batch, forward_only=True, outputs=[HeadOutput.LOGPROB])


def test_without_a_cap_a_rank_gets_one_micro_batch(
    engine: BaseEngine, make_batch: MakeBatch
) -> None:
    batch = engine.shard_data(make_batch([4, 5, 300]))
    assert [micro_batch.num_tokens for micro_batch in batch.iterate_micro_batches()] == [309]


def test_ranks_gather_small_objects_in_rank_order(make_engines: MakeEngines) -> None:
    engines = make_engines(2)
    with ThreadPoolExecutor(2) as pool:
        gathered = list(
            pool.map(
                lambda engine: engine.gather_objects(("rank", engine.topology.global_rank)), engines
            )
        )
    assert gathered == [[("rank", 0), ("rank", 1)]] * 2


def test_modes_do_not_nest(engine: BaseEngine) -> None:
    with (
        engine.train_mode(),
        pytest.raises(EngineStateError, match=r"eval_mode\(\) inside train_mode\(\)"),
    ):
        with engine.eval_mode():
            pass


def test_offload_is_restored_after_an_exception(engine: BaseEngine) -> None:
    with pytest.raises(KeyError):
        with engine.train_mode():
            raise KeyError
    assert engine.mode_events == ["in train", "out train"]  # type: ignore[attr-defined]
    with engine.eval_mode():
        pass


# An update.


def test_an_update_moves_the_weights_along_the_gradient(
    engine: BaseEngine, make_batch: MakeBatch
) -> None:
    batch = engine.shard_data(make_batch([6, 7, 3]), max_tokens=64)
    before = table_of(engine)
    norm = update(engine, batch)
    assert engine.last_update is not None
    assert (engine.last_update.outcome, engine.last_update.grad_norm) == ("stepped", norm)
    assert norm > 0
    assert engine.num_updates == 1
    # Adam's first step is lr * sign(gradient) where there is one.
    moved = (table_of(engine) - before).abs()
    assert moved.max().item() == pytest.approx(0.1, rel=1e-3)


def test_loss_matches_the_formula(engine: BaseEngine, make_batch: MakeBatch) -> None:
    mini_batch = make_batch([6, 7, 3])
    with engine.eval_mode():
        result = engine.forward_backward_batch(
            engine.shard_data(mini_batch, max_tokens=8), forward_only=True
        )
    previous, trained = mini_batch.tokens.roll(1), mini_batch.loss_mask
    logprobs = table_of(engine).log_softmax(-1)[previous, mini_batch.tokens]
    expected = -(mini_batch.columns["advantages"] * logprobs)[trained].mean()
    assert result.metrics["loss"].result == pytest.approx(expected.item(), rel=1e-5)
    assert result.outputs is None


def test_two_calls_then_a_step_equal_one_call(
    make_engines: MakeEngines, make_batch: MakeBatch
) -> None:
    mini_batch = make_batch([6, 7, 3, 4])
    (one,), (two,) = make_engines(), make_engines()
    full = one.shard_data(mini_batch, max_tokens=64)
    halves = [full.select([0, 1]), full.select([2, 3])]
    packed = [
        pack_single_micro_batch(
            half, constraints=PlanConstraints(), sum_over_ranks=two._sum_over_data_parallel
        )
        for half in halves
    ]
    calls = [replace(call, denominators=full.denominators) for call in packed]
    assert update(two, *calls) == pytest.approx(update(one, full), rel=1e-6)
    torch.testing.assert_close(table_of(two), table_of(one), rtol=1e-6, atol=1e-6)


def test_call_after_the_final_one_is_an_error(engine: BaseEngine, make_batch: MakeBatch) -> None:
    batch = engine.shard_data(make_batch([4, 5]), max_tokens=16)
    with engine.train_mode():
        engine.forward_backward_batch(batch, forward_only=False)
        with pytest.raises(EngineStateError, match="already reduced"):
            engine.forward_backward_batch(batch, forward_only=False)
        engine.optimizer_step()
        with pytest.raises(EngineStateError, match="already reduced"):
            engine.forward_backward_batch(batch, forward_only=False)


def test_forward_pass_between_two_calls_does_not_change_the_gradients(
    make_engines: MakeEngines, make_batch: MakeBatch
) -> None:
    (one,), (two,) = make_engines(), make_engines()
    batch = one.shard_data(make_batch([4, 5]), max_tokens=16)
    norm = update(one, batch)
    two.optimizer_zero_grad()
    with two.train_mode():
        two.forward_backward_batch(batch, forward_only=False, final=False)
    with two.eval_mode():
        two.forward_backward_batch(batch, forward_only=True, outputs=[HeadOutput.LOGPROB])
    assert two.optimizer_step() == norm


def test_a_step_without_gradients_is_an_error(engine: BaseEngine, make_batch: MakeBatch) -> None:
    with pytest.raises(EngineStateError, match="there are no gradients"):
        engine.optimizer_step()
    update(engine, engine.shard_data(make_batch([4, 5]), max_tokens=16))
    with pytest.raises(EngineStateError, match="there are no gradients"):
        engine.optimizer_step()


def test_a_step_that_failed_is_not_repeated_with_the_same_gradients(
    engine: BaseEngine, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = engine.shard_data(make_batch([4, 5]), max_tokens=16)
    apply = engine._apply_gradients

    def apply_and_fail(*, lr: float) -> float:
        apply(lr=lr)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine, "_apply_gradients", apply_and_fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        update(engine, batch)
    engine.optimizer_zero_grad()
    with pytest.raises(EngineStateError, match="some of them may be updated and others not"):
        update(engine, batch)
    assert_refuses_to_read_weights(engine, batch, match=r"optimizer_step\(\) raised")


def test_update_with_partly_zeroed_gradients_is_refused_and_discarded(
    engine: BaseEngine, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = engine.shard_data(make_batch([4, 5]), max_tokens=16)
    engine.optimizer_zero_grad()
    with engine.train_mode():
        engine.forward_backward_batch(batch, forward_only=False, final=False)
    calls = []

    def fail() -> None:
        calls.append("zero")
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "_zero_gradients", fail)
    monkeypatch.setattr(engine, "_discard_update", lambda: calls.append("discard"))
    with pytest.raises(KeyboardInterrupt):
        engine.optimizer_zero_grad()
    with pytest.raises(EngineStateError, match=r"raised \(KeyboardInterrupt"):
        engine.optimizer_step()
    with pytest.raises(EngineStateError, match=r"raised \(KeyboardInterrupt"), engine.train_mode():
        engine.forward_backward_batch(batch, forward_only=False)
    engine.optimizer_zero_grad()
    assert calls == ["zero", "discard"]


def assert_refuses_to_read_weights(engine: BaseEngine, batch: PackedBatch, *, match: str) -> None:
    with pytest.raises(EngineStateError, match=match), engine.eval_mode():
        engine.forward_backward_batch(batch, forward_only=True, outputs=[HeadOutput.LOGPROB])
    for export in (engine.export_weights, engine.export_state):
        with pytest.raises(EngineStateError, match=match):
            export()


def test_checkpoint_completes_an_interrupted_load(
    engine: BaseEngine, make_batch: MakeBatch, tmp_path: Path
) -> None:
    batch = engine.shard_data(make_batch([4, 5]), max_tokens=16)
    saved = engine.save_checkpoint(str(tmp_path), global_step=0)
    with pytest.raises(WeightError):
        engine.load_weights([])  # nothing was loaded
    assert update(engine, batch) > 0
    with pytest.raises(ZeroDivisionError):
        engine.load_weights(NamedWeight("table", table_of(engine) / (1 // 0)) for _ in range(2))
    with pytest.raises(EngineStateError, match=r"load_weights\(\) raised .* call load_weights"):
        update(engine, batch)
    assert_refuses_to_read_weights(engine, batch, match=r"load_weights\(\) raised")
    with pytest.raises(CheckpointError, match=r"load_weights\(\) raised"):
        engine.save_checkpoint(str(tmp_path), global_step=1)
    engine.load_checkpoint(saved)
    assert update(engine, batch) > 0


def raise_out_of_memory(*_arguments: object) -> None:
    raise torch.OutOfMemoryError("injected after the passes")


@pytest.mark.parametrize("is_rfc_call", [False, True])
def test_exception_after_the_passes_fails_the_update(
    engine: BaseEngine,
    make_batch: MakeBatch,
    monkeypatch: pytest.MonkeyPatch,
    is_rfc_call: bool,
) -> None:
    batch = engine.shard_data(make_batch([4, 5]), max_tokens=16)
    train = (
        partial(engine.forward_backward_step, batch)
        if is_rfc_call
        else partial(engine.forward_backward_batch, batch, forward_only=False, final=False)
    )
    engine.optimizer_zero_grad()
    with monkeypatch.context() as patch, engine.train_mode():
        # The counts of a packed batch are known, so only the loss is summed over ranks.
        name = "_sum_over_data_parallel" if is_rfc_call else "_collect_metrics"
        patch.setattr(engine, name, raise_out_of_memory)
        with pytest.raises(torch.OutOfMemoryError, match="injected"):
            train()
    with pytest.raises(EngineStateError, match=r"injected after the passes\).*optimizer_zero_grad"):
        engine.optimizer_step()
    with pytest.raises(EngineStateError, match="optimizer_zero_grad"), engine.train_mode():
        engine.forward_backward_batch(batch, forward_only=False)


def test_update_counts_if_the_state_cannot_be_offloaded_after_it(
    engine: BaseEngine, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def fail_on_exit(_mode: str) -> Iterator[None]:
        yield
        raise KeyboardInterrupt

    batch = engine.shard_data(make_batch([4, 5]), max_tokens=16)
    with engine.train_mode():
        engine.forward_backward_batch(batch, forward_only=False)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_loaded", fail_on_exit)
        with pytest.raises(KeyboardInterrupt):
            engine.optimizer_step()
    assert engine.num_updates == 1
    assert engine.last_update is not None
    assert engine.last_update.outcome == "stepped"


def test_exception_after_a_forward_pass_keeps_the_update(
    make_engines: MakeEngines, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    (engine,), (other,) = make_engines(), make_engines()
    batch = engine.shard_data(make_batch([4, 5]), max_tokens=16)
    expected = update(other, batch)
    engine.optimizer_zero_grad()
    with engine.train_mode():
        engine.forward_backward_batch(batch, forward_only=False)
        monkeypatch.setattr(engine, "_collect_metrics", raise_out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            engine.forward_backward_batch(batch, forward_only=True)
    assert engine.optimizer_step() == expected


def test_an_engine_without_an_optimizer_neither_trains_nor_steps(
    make_engines: MakeEngines, make_batch: MakeBatch
) -> None:
    (engine,) = make_engines(optimizer=None)
    batch = engine.shard_data(make_batch([4]), max_tokens=16)
    with engine.train_mode(), pytest.raises(EngineStateError, match=r"can't train"):
        engine.forward_backward_batch(batch, forward_only=False)
    with pytest.raises(EngineStateError, match=r"can't train"):
        engine.optimizer_step()
    assert engine.current_lr == 0.0


def test_a_batch_without_the_objectives_columns_is_refused(
    engine: BaseEngine, make_batch: MakeBatch
) -> None:
    batch = replace(engine.shard_data(make_batch([4]), max_tokens=16), columns={})
    with (
        engine.train_mode(),
        pytest.raises(
            EngineStateError, match=r"needs columns that the batch does not have: \['advantages'\]"
        ),
    ):
        engine.forward_backward_batch(batch, forward_only=False)


def test_training_without_a_loss_is_an_error(make_batch: MakeBatch, engine: BaseEngine) -> None:
    fresh = type(engine)(engine.config)
    fresh.init_model()
    batch = engine.shard_data(make_batch([4]), max_tokens=16)
    with fresh.train_mode(), pytest.raises(EngineStateError, match="needs an Objective"):
        fresh.forward_backward_batch(batch, forward_only=False)
    with fresh.train_mode(), pytest.raises(EngineStateError, match="there is no loss function"):
        fresh.forward_backward_step(batch)


def test_required_outputs_are_refused_with_an_objective(
    engine: BaseEngine, objective: Objective
) -> None:
    with pytest.raises(ConfigError, match="required_outputs has no effect with an Objective"):
        engine.set_loss_fn(objective, required_outputs=[HeadOutput.ENTROPY])


# Skipped updates.


def test_a_nonfinite_gradient_skips_on_every_rank(
    make_engines: MakeEngines, make_batch: MakeBatch
) -> None:
    engines = make_engines(2, schedule=ScheduleSpec(warmup_steps=4))
    mini_batch = make_batch([5, 6, 4, 7], sample_ids=[10, 11, 12, 13])
    before = [table_of(engine) for engine in engines]

    def run(rank: int) -> float:
        local_batch = engines[rank].shard_data(mini_batch, max_tokens=64)
        if rank == 1:
            local_batch = local_batch.with_columns(
                {"advantages": torch.full((local_batch.num_tokens,), torch.inf)}
            )
        norm = update(engines[rank], local_batch)
        engines[rank].lr_scheduler_step()
        return norm

    norms = engines[0].rank_threads.run(run)  # type: ignore[attr-defined]
    assert not any(math.isfinite(norm) for norm in norms)
    for engine, start in zip(engines, before, strict=True):
        assert engine.last_update is not None
        assert (engine.last_update.outcome, engine.num_nonfinite_updates, engine.num_updates) == (
            "nonfinite",
            1,
            0,
        )
        assert (engine.num_schedule_steps, engine.current_lr) == (0, 0.025)  # 0.1 / 4
        assert torch.equal(table_of(engine), start)
    ids = [engine.last_update.sample_ids for engine in engines if engine.last_update]
    assert sorted(ids[0] + ids[1]) == [10, 11, 12, 13]


def test_too_many_skips_in_a_row_stop_the_run(engine: BaseEngine, make_batch: MakeBatch) -> None:
    bad = poisoned(engine.shard_data(make_batch([5, 6], sample_ids=[4, 8]), max_tokens=64))
    assert isinstance(bad, PackedBatch)
    for _ in range(2):
        update(engine, bad)
    with pytest.raises(
        EngineStateError,
        match=r"3 updates in a row .*max_consecutive_skips.* samples of this rank: \((4, 8|8, 4)\)",
    ):
        update(engine, bad)


def test_too_many_skips_under_fp16_name_the_loss_scale(
    engine: BaseEngine, make_batch: MakeBatch
) -> None:
    bad = poisoned(engine.shard_data(make_batch([5, 6]), max_tokens=64))
    assert isinstance(bad, PackedBatch)
    engine.loss_scale = LossScale(PrecisionSpec(compute="fp16", initial_loss_scale=1024.0))
    for _ in range(2):
        update(engine, bad)
    with pytest.raises(
        EngineStateError,
        match=r"fp16 loss scale has dropped to 128\.0: .* lower precision\.initial_loss_scale",
    ):
        update(engine, bad)


def test_a_good_update_ends_a_row_of_skips(engine: BaseEngine, make_batch: MakeBatch) -> None:
    good = engine.shard_data(make_batch([5, 6]), max_tokens=64)
    bad = poisoned(good)
    assert isinstance(bad, PackedBatch)
    for batch in (bad, bad, good, bad, bad):
        update(engine, batch)
    assert (engine.num_nonfinite_updates, engine.num_updates) == (4, 1)


def test_fully_masked_batch_skips_the_step(engine: BaseEngine, make_batch: MakeBatch) -> None:
    update(
        engine, engine.shard_data(make_batch([5, 6]), max_tokens=64)
    )  # so that Adam's moments would move the weights
    before = table_of(engine)
    assert update(engine, engine.shard_data(untrained(make_batch([5])), max_tokens=64)) == 0.0
    assert engine.last_update is not None
    assert engine.last_update.outcome == "nothing_trained"
    assert engine.lr_scheduler_step() == engine.current_lr
    assert (engine.num_schedule_steps, engine.num_updates) == (0, 1)
    assert torch.equal(table_of(engine), before)


def test_schedule_advances_only_with_updates_that_were_applied(
    make_engines: MakeEngines, make_batch: MakeBatch
) -> None:
    (engine,) = make_engines(schedule=ScheduleSpec(warmup_steps=2))
    batch = engine.shard_data(make_batch([5, 6]), max_tokens=64)
    rates = [engine.current_lr]
    for _ in range(2):
        update(engine, batch)
        rates.append(engine.lr_scheduler_step())
    assert rates == [0.05, 0.1, 0.1]


# Data over ranks.


@settings(max_examples=25)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12), num_ranks=st.integers(1, 3))
def test_unshard_data_inverts_shard_data(
    make_engines: MakeEngines, make_batch: MakeBatch, lengths: list[int], num_ranks: int
) -> None:
    engines = make_engines(num_ranks)
    mini_batch = make_batch(lengths, sample_ids=[50 - i for i in range(len(lengths))])

    def run(rank: int) -> SequenceBatch:
        return engines[rank].unshard_data(
            engines[rank].shard_data(mini_batch, max_tokens=12), sample_ids=mini_batch.sample_ids
        )

    for back in engines[0].rank_threads.run(run):  # type: ignore[attr-defined]
        assert torch.equal(back.tokens, mini_batch.tokens)
        assert torch.equal(back.sequence_starts, mini_batch.sequence_starts)
        assert torch.equal(back.columns["advantages"], mini_batch.columns["advantages"])
        assert torch.equal(back.sample_ids, mini_batch.sample_ids)


def test_unshard_data_sorts_by_id_by_default(engine: BaseEngine, make_batch: MakeBatch) -> None:
    mini_batch = make_batch([3, 4, 2], sample_ids=[7, 5, 6])
    assert engine.unshard_data(engine.shard_data(mini_batch, max_tokens=9)).sample_ids.tolist() == [
        5,
        6,
        7,
    ]


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_gradient_is_independent_of_data_parallel_size(
    make_engines: MakeEngines, make_batch: MakeBatch, num_ranks: int
) -> None:
    mini_batch = make_batch([9, 2, 7, 3, 5])
    (single,) = make_engines()
    expected = update(single, single.shard_data(mini_batch, max_tokens=64))
    engines = make_engines(num_ranks)
    norms = engines[0].rank_threads.run(
        lambda rank: update(engines[rank], engines[rank].shard_data(mini_batch, max_tokens=9))
    )  # type: ignore[attr-defined]
    assert norms == pytest.approx([expected] * num_ranks, rel=1e-5)
    torch.testing.assert_close(table_of(engines[0]), table_of(single), rtol=1e-5, atol=1e-5)


def test_outputs_are_in_the_requested_order(
    make_engines: MakeEngines, make_batch: MakeBatch
) -> None:
    engines = make_engines(3)
    mini_batch = make_batch([4, 4, 2, 6])

    def run(rank: int) -> Tensor:
        engine = engines[rank]
        with engine.eval_mode():
            local_batch = engine.shard_data(mini_batch, max_tokens=6)
            outputs = engine.forward_backward_batch(
                local_batch, forward_only=True, outputs=[HeadOutput.LOGPROB]
            ).outputs
        return engine.unshard_outputs(outputs, sample_ids=mini_batch.sample_ids).columns[
            HeadOutput.LOGPROB
        ]

    logprobs = table_of(engines[0]).log_softmax(-1)[mini_batch.tokens.roll(1), mini_batch.tokens]
    logprobs[mini_batch.sequence_starts.long()[:-1]] = 0.0
    for gathered in engines[0].rank_threads.run(run):  # type: ignore[attr-defined]
        torch.testing.assert_close(gathered, logprobs)


# The RFC's hooks.


def test_an_rfc_step_takes_a_padded_mapping_and_passes_its_context(
    engine: BaseEngine, make_batch: MakeBatch
) -> None:
    seen: list[object] = []

    def preprocess(batch, ctx):  # type: ignore[no-untyped-def]
        return batch, {**ctx, "pre": True}

    def postprocess(predictions, ctx):  # type: ignore[no-untyped-def]
        return {**predictions, "doubled": predictions["logprob"] * 2}, {**ctx, "post": True}

    def loss_fn(data: SequenceBatch, predictions, ctx):  # type: ignore[no-untyped-def]
        seen.append(ctx)
        return -predictions["doubled"][data.loss_mask].mean(), {**ctx, "loss": True}

    engine.set_loss_fn(loss_fn)
    batch = make_batch([4, 6])
    engine.optimizer_zero_grad()
    with engine.train_mode():
        predictions, loss, ctx = engine.forward_backward_step(  # type: ignore[misc]
            to_padded(batch), {}, preprocess_fn=preprocess, postprocess_fn=postprocess
        )
    assert ctx == {"pre": True, "post": True, "loss": True}
    assert loss.item() == pytest.approx(-predictions["doubled"][batch.loss_mask].mean().item())
    assert not predictions["logprob"].requires_grad
    assert engine.optimizer_step() > 0


def test_an_rfc_forward_pass_returns_predictions_and_context(
    engine: BaseEngine, make_batch: MakeBatch
) -> None:
    with engine.eval_mode():
        predictions, ctx = engine.forward_backward_step(make_batch([4]), None, forward_only=True)  # type: ignore[misc]
    assert predictions["logprob"].shape == (4,)
    assert ctx is None


def test_an_rfc_loss_is_averaged_over_ranks_and_calls_add_up(
    make_engines: MakeEngines, make_batch: MakeBatch
) -> None:
    engines = make_engines(2)
    batches = [make_batch([4], seed=0), make_batch([6], seed=1)]

    def run(rank: int) -> tuple[float, float]:
        engine = engines[rank]
        engine.set_loss_fn(lambda data, predictions, ctx: (predictions["logprob"].sum(), ctx))
        engine.optimizer_zero_grad()
        with engine.train_mode():
            _, loss, _ = engine.forward_backward_step(batches[rank])  # type: ignore[misc]
            engine.forward_backward_step(batches[rank])
        return loss.item(), engine.optimizer_step()

    logprobs = table_of(engines[0]).log_softmax(-1)
    sums = [logprobs[b.tokens.roll(1), b.tokens][1:].sum().item() for b in batches]
    table = table_of(engines[0]).requires_grad_()
    total = sum(table.log_softmax(-1)[b.tokens.roll(1), b.tokens][1:].sum() for b in batches)
    (gradient,) = torch.autograd.grad(total, table)
    for loss, norm in engines[0].rank_threads.run(run):  # type: ignore[attr-defined]
        assert loss == pytest.approx(sum(sums) / 2, rel=1e-5)
        assert norm == pytest.approx(
            gradient.norm().item(), rel=1e-5
        )  # two calls of half the sum each


def test_an_objective_under_the_rfc_loop_gives_the_same_gradient(
    make_engines: MakeEngines, make_batch: MakeBatch
) -> None:
    (one,), (two,) = make_engines(), make_engines()
    mini_batch = make_batch([4, 6])
    expected = update(one, one.shard_data(mini_batch, max_tokens=64))
    two.optimizer_zero_grad()
    with two.train_mode():
        two.forward_backward_step(mini_batch)
    assert two.optimizer_step() == pytest.approx(expected, rel=1e-6)


# Weights and state.


def test_weights_can_be_read_only_inside_the_context(engine: BaseEngine) -> None:
    stream = engine.export_weights()
    with pytest.raises(EngineStateError, match=r"only inside `with engine.export_weights\(\)"):
        next(stream)
    with stream:
        weight = next(stream)
    with pytest.raises(EngineStateError):
        next(stream)
    with pytest.raises(EngineStateError, match="already used"), stream:
        pass
    assert weight.tensor.shape == (11, 11)


@pytest.mark.parametrize("stream", ["export_weights", "export_state"])
@pytest.mark.parametrize("change", ["load_weights", "load_state", "load_checkpoint", "step"])
def test_stream_ends_with_an_error_if_the_weights_change(
    make_engines: MakeEngines,
    make_batch: MakeBatch,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    stream: str,
    change: str,
) -> None:
    (engine,), (exporting,) = make_engines(), make_engines()
    # The model is a single tensor, so it is exported twice.
    for name in ("_iterate_weights", "_iterate_state"):
        iterate = getattr(exporting, name)
        monkeypatch.setattr(exporting, name, lambda iterate=iterate: chain(iterate(), iterate()))
    saved = exporting.save_checkpoint(str(tmp_path), global_step=0)
    changes: dict[str, Callable[[], object]] = {
        "load_weights": lambda: exporting.load_weights([NamedWeight("table", table_of(engine))]),
        "load_state": lambda: exporting.load_state(engine.export_state()),
        "load_checkpoint": lambda: exporting.load_checkpoint(saved),
        "step": lambda: update(exporting, engine.shard_data(make_batch([4, 5]))),
    }
    with exporting.export_weights() as weights:
        items = weights if stream == "export_weights" else exporting.export_state()
        next(items)
        changes[change]()
        with pytest.raises(EngineStateError, match=rf"updated while {stream}\(\) was read"):
            next(items)


def test_engine_can_load_its_own_stream(engine: BaseEngine) -> None:
    before = table_of(engine)
    with engine.export_weights() as stream:
        engine.load_weights(stream)
    assert torch.equal(table_of(engine), before)


def test_engine_that_was_built_in_inference_mode_can_be_trained(
    engine: BaseEngine, make_batch: MakeBatch
) -> None:
    built = type(engine)(engine.config)
    with torch.inference_mode():
        built.init_model()
    built.set_loss_fn(engine.objective)
    batch = engine.shard_data(make_batch([4, 5]), max_tokens=16)
    assert update(built, batch) == update(engine, batch)
    assert torch.equal(table_of(built), table_of(engine))


def test_engine_is_closed_after_the_report_if_another_rank_is_not_built_in_time(
    make_engines: Callable[..., list[BaseEngine]],
) -> None:
    (built,) = make_engines(collective_timeout_s=1)
    store = HashStore()
    failures = RankFailures(store, rank=0, world_size=2)
    with pytest.raises(CollectiveTimeoutError, match=r"ranks \[1\] did not build") as caught:
        built._meet_other_ranks(failures)
    assert not hasattr(built, "table")
    # Its own report has ended before: the error names the broken group, and is not reported again.
    assert "rank 0 raised in init_model(): CollectiveTimeoutError" in caught.value.__notes__[0]


def test_loading_is_strict(engine: BaseEngine) -> None:
    good = table_of(engine)
    with pytest.raises(WeightError, match="missing table; unexpected tabel"):
        engine.load_weights([NamedWeight("tabel", good)])
    with pytest.raises(WeightError, match="1 names came twice"):
        engine.load_weights([NamedWeight("table", good), NamedWeight("table", good)])
    with pytest.raises(WeightError, match=r"table: shape \(11,\), expected \(11, 11\)"):
        engine.load_weights([NamedWeight("table", good[0])])


@pytest.mark.bitwise
def test_portable_state_transfers_the_optimizer(
    make_engines: MakeEngines, make_batch: MakeBatch
) -> None:
    (one,), (two,) = (
        make_engines(),
        make_engines(model=ModelSpec(architecture={"model_type": "bigram"}, seed=5)),
    )
    batch = one.shard_data(make_batch([5, 6]), max_tokens=64)
    update(one, batch)
    two.load_state(one.export_state())
    for engine in (one, two):
        update(engine, batch)
    assert torch.equal(table_of(one), table_of(two))


@pytest.mark.bitwise
def test_resume_is_bitwise(
    make_engines: MakeEngines, make_batch: MakeBatch, tmp_path: Path
) -> None:
    schedule = ScheduleSpec(kind="linear", warmup_steps=2, total_steps=9)
    (straight,), (first,), (second,) = (make_engines(schedule=schedule) for _ in range(3))
    batches = [
        straight.shard_data(make_batch([5, 6], seed=seed), max_tokens=64) for seed in range(5)
    ]

    def train(engine: BaseEngine, chosen: list[PackedBatch]) -> None:
        for batch in chosen:
            update(engine, batch)
            engine.lr_scheduler_step()

    train(straight, batches)
    train(first, batches[:2])
    saved = first.save_checkpoint(str(tmp_path), global_step=2)
    second.load_checkpoint(saved)
    train(second, batches[2:])
    assert torch.equal(table_of(second), table_of(straight))
    assert (second.num_updates, second.current_lr) == (5, straight.current_lr)


def test_loading_a_checkpoint_drops_gradients(
    engine: BaseEngine, make_batch: MakeBatch, tmp_path: Path
) -> None:
    saved = engine.save_checkpoint(str(tmp_path), global_step=0)
    with engine.train_mode():
        engine.forward_backward_batch(
            engine.shard_data(make_batch([4]), max_tokens=9), forward_only=False
        )
    engine.load_checkpoint(saved)
    with pytest.raises(EngineStateError, match="there are no gradients"):
        engine.optimizer_step()


def test_unshard_data_of_only_dummies_is_an_error(
    engine: BaseEngine, make_batch: MakeBatch
) -> None:
    mini_batch = make_batch([3])
    dummy = from_sequences(
        [mini_batch.tokens[:1]], loss_masks=[torch.tensor([False])], sample_ids=[-1]
    )
    with pytest.raises(BatchError, match="got no batch"):
        engine.unshard_data(dummy)


def test_an_optimizer_without_clipping_reports_the_same_norm(
    make_engines: MakeEngines, make_batch: MakeBatch
) -> None:
    (free,), (clipped,) = (
        make_engines(),
        make_engines(optimizer=OptimizerSpec(lr=0.1, clip_grad_norm=1e-3)),
    )
    batch = free.shard_data(make_batch([5, 6]), max_tokens=64)
    assert update(free, batch) == update(clipped, batch)
