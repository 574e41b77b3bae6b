"""Conformance tests of adapters: training, disabling, merging, PEFT's format and resume."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.capabilities import Capability
from temper_engine_api.conformance.harness.engine_under_test import EngineUnderTest
from temper_engine_api.conformance.harness.measurements import (
    ONE_MICRO_BATCH,
    TWO_MICRO_BATCHES,
    collect_weights,
    load_and_train,
    measure_update,
    measure_updates,
    rank_slice,
    train,
    train_and_save,
    train_without_stop,
)
from temper_engine_api.conformance.harness.rank import ADAMW, EngineSetup, Rank
from temper_engine_api.conformance.harness.tolerances import (
    GRADIENT,
    LOGPROB,
    LOSS,
    UPDATE,
    assert_all_close,
    assert_all_equal,
    assert_close,
    assert_same_state,
)
from temper_engine_api.conformance.inputs.probes import ClippedPpoProbe, ClippedValueProbe
from temper_engine_api.conformance.inputs.tiny_adapters import (
    TinyAdapter,
    read_adapter,
    save_adapter,
)
from temper_engine_api.conformance.inputs.tiny_models import QWEN2_GROUPED, QWEN2_UNTIED, VALUE
from temper_engine_api.conformance.oracle.oracle_cache import OracleCache
from temper_engine_api.conformance.oracle.oracle_comparison import check_update
from temper_engine_api.engine import BaseEngine
from temper_engine_api.errors import ConfigError, EngineStateError, WeightError
from temper_engine_api.objective import HeadOutput
from temper_engine_api.specs import LoraSpec, ScheduleSpec

pytestmark = pytest.mark.if_claimed(Capability.ADAPTER)

PLAIN = TinyAdapter(name="plain", model=QWEN2_GROUPED)
ATTENTION = TinyAdapter(
    name="attention-rslora",
    model=QWEN2_GROUPED,
    fields={"target_modules": ["q_proj", "v_proj"], "use_rslora": True},
)
DORA = TinyAdapter(name="dora", model=QWEN2_GROUPED, fields={"use_dora": True}, seed=1)
HEAD = TinyAdapter(
    name="with-head",
    model=QWEN2_UNTIED,
    fields={"modules_to_save": ["lm_head"], "exclude_modules": ["lm_head"]},
)
ADAPTERS = (PLAIN, ATTENTION, DORA, HEAD)
VALUE_ADAPTER = TinyAdapter(
    name="value", model=VALUE, fields={"modules_to_save": ["score"], "exclude_modules": ["score"]}
)

every_adapter = pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.name)


@every_adapter
def test_adapter_gradient_matches_oracle(
    engine_under_test: EngineUnderTest, oracle: OracleCache, adapter: TinyAdapter
) -> None:
    """Adapter gradients, loss and norm equal the oracle's; the base gets no gradient."""
    setup, batch = oracle.make_adapter_setup(adapter), oracle.get_batch(model=adapter.model)
    expected = oracle.get_update(setup, ClippedPpoProbe(), batch)
    assert all(name.startswith("base_model.model.") for name in expected.gradients), (
        "the oracle trains more than its adapter"
    )
    for split in (ONE_MICRO_BATCH, TWO_MICRO_BATCHES):
        updates = check_update(
            engine_under_test,
            oracle,
            setup=setup,
            objective=ClippedPpoProbe(),
            batch=batch,
            split=split,
        )
        assert_close(updates[0].grad_norm, expected.grad_norm, LOSS, quantity="gradient norm")


def test_adapter_updates_match_adamw(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Two AdamW updates with weight decay give the oracle's adapter; both factors move."""
    # fp32 also in a run with bf16 compute: Adam turns rounding of small gradients into steps.
    setup = oracle.make_adapter_setup(PLAIN, optimizer=ADAMW, compute="fp32")
    batches = [oracle.get_batch(seed=seed) for seed in range(2)]
    expected = oracle.run(
        measure_updates, setup=setup, objective=ClippedPpoProbe(), batches=batches
    )
    updates = engine_under_test.run(
        measure_updates, setup=setup, objective=ClippedPpoProbe(), batches=batches
    )[0]
    for update, expected_update in zip(updates, expected, strict=True):
        assert_all_close(
            update.masters, expected_update.masters, UPDATE, quantity="adapter after the update"
        )


@pytest.mark.if_claimed(Capability.VALUE_MODEL)
def test_value_head_is_trained_with_the_adapter(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """A value head in `modules_to_save` gets the oracle's gradient."""
    setup, batch = oracle.make_adapter_setup(VALUE_ADAPTER), oracle.get_batch()
    expected = oracle.get_update(setup, ClippedValueProbe(), batch)
    assert "base_model.model.score.weight" in expected.gradients
    updates = engine_under_test.run(
        measure_update, setup=setup, objective=ClippedValueProbe(), batch=batch
    )
    assert_all_close(updates[0].gradients, expected.gradients, GRADIENT, quantity="gradient")


def test_new_adapter_changes_no_output(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """A newly initialized adapter leaves log-probs as they are, since its B factors are 0."""
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    fresh = replace(setup, lora=oracle.make_lora_spec(rank=4))
    expected = oracle.get_outputs(setup, batch, HeadOutput.LOGPROB)
    logprobs = engine_under_test.run(measure_logprobs, setup=fresh, batch=batch)[0]
    assert_logprobs(engine_under_test, logprobs, expected, batch=batch)


def assert_logprobs(
    engine_under_test: EngineUnderTest, logprobs: Tensor, expected: Tensor, *, batch: SequenceBatch
) -> None:
    """Compare log-probs; a failure also names the data-parallel rank."""
    assert_close(
        logprobs,
        expected,
        LOGPROB,
        quantity="log-probs",
        batch=batch,
        num_ranks=engine_under_test.num_data_ranks,
    )


def measure_logprobs(rank: Rank, *, setup: EngineSetup, batch: SequenceBatch) -> Tensor:
    """Return log-probs [T] in batch order."""
    return compute_logprobs(rank.cached_engine(setup), batch)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {
            "rslora": True,
            "dora": True,
            "target_modules": ("q_proj", "v_proj", "o_proj"),
            "exclude_modules": ("o_proj",),
        },
    ],
    ids=["all-linear", "attention-rslora-dora"],
)
def test_new_adapter_has_the_requested_layers_and_scale(
    engine_under_test: EngineUnderTest,
    oracle: OracleCache,
    fields: dict[str, Any],
    tmp_path: Path,
) -> None:
    """A new adapter has PEFT's layers for the same settings, and its gradient has their scale.

    The oracle loads the exported adapter with the requested alpha, and computes the gradient.
    """
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    lora = replace(oracle.make_lora_spec(rank=4), **fields)
    new = replace(setup, lora=lora)
    config, tensors = engine_under_test.run(export_adapter, setup=new)[0]
    _, oracle_tensors = oracle.run(export_adapter, setup=new)
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        name: tensor.shape for name, tensor in oracle_tensors.items()
    }
    assert (config["r"], config["lora_alpha"]) == (lora.rank, lora.alpha)
    # PEFT reads an absent setting as False.
    for name, value in (("use_rslora", lora.rslora), ("use_dora", lora.dora)):
        assert config.get(name, False) == value, f"{name} must be {value}"
    folder = save_adapter(config, tensors, folder=tmp_path / "adapter")
    expected = oracle.get_update(
        replace(setup, lora=LoraSpec(path=str(folder))), ClippedPpoProbe(), batch
    )
    update = engine_under_test.run(
        measure_update, setup=new, objective=ClippedPpoProbe(), batch=batch
    )[0]
    assert_all_close(update.gradients, expected.gradients, GRADIENT, quantity="gradient")


@every_adapter
def test_loaded_adapter_is_exported_unchanged(
    engine_under_test: EngineUnderTest, oracle: OracleCache, adapter: TinyAdapter
) -> None:
    """`export_adapter` returns the tensors of `lora.path` bit for bit on every rank."""
    setup = oracle.make_adapter_setup(adapter)
    _, on_disk = read_adapter(Path(str(setup.lora.path)))
    for _, tensors in engine_under_test.run(export_adapter, setup=setup):
        assert_all_equal(tensors, on_disk, quantity="adapter")


def export_adapter(
    rank: Rank, *, setup: EngineSetup
) -> tuple[dict[str, object], dict[str, Tensor]]:
    """Return the configuration and tensors that every rank exports."""
    config, tensors = rank.cached_engine(setup).export_adapter()
    return dict(config), dict(tensors)


@pytest.fixture(scope="module")
def trained_adapters() -> dict[str, "TrainedAdapter"]:
    """Cache trained adapters by engine layout and adapter."""
    return {}


@pytest.fixture
def trained(
    request: pytest.FixtureRequest,
    engine_under_test: EngineUnderTest,
    oracle: OracleCache,
    adapter: TinyAdapter,
    trained_adapters: dict[str, "TrainedAdapter"],
) -> "TrainedAdapter":
    """Train one adapter for three tests, which have the same parameters."""
    key = request.node.callspec.id
    if key not in trained_adapters:
        setup, batch = get_trained_case(oracle, adapter)
        results = engine_under_test.run(train_adapter, setup=setup, batch=batch)
        trained_adapters[key] = results[0]
    return trained_adapters[key]


def get_trained_case(
    oracle: OracleCache, adapter: TinyAdapter
) -> tuple[EngineSetup, SequenceBatch]:
    """Return setup and mini-batch of `trained`."""
    setup = oracle.make_adapter_setup(adapter, optimizer=ADAMW)
    return setup, oracle.get_batch(model=adapter.model)


@every_adapter
def test_adapter_loads_in_peft_with_same_logits(
    trained: "TrainedAdapter", oracle: OracleCache, adapter: TinyAdapter, tmp_path: Path
) -> None:
    """A trained and exported adapter gives the same log-probs in PEFT.

    The oracle loads the saved directory with `PeftModel.from_pretrained`.
    """
    setup, batch = get_trained_case(oracle, adapter)
    folder = save_adapter(*trained.adapter, folder=tmp_path / "adapter")
    expected = oracle.get_outputs(
        replace(setup, lora=LoraSpec(path=str(folder))), batch, HeadOutput.LOGPROB
    )
    assert_close(trained.logprobs, expected, LOGPROB, quantity="log-probs", batch=batch)


@every_adapter
def test_merged_weights_give_same_logits_in_transformers(
    trained: "TrainedAdapter", oracle: OracleCache, adapter: TinyAdapter, tmp_path: Path
) -> None:
    """Exported weights include the adapter and give the same log-probs in transformers."""
    setup, batch = get_trained_case(oracle, adapter)
    shutil.copy(Path(setup.model_path) / "config.json", tmp_path)
    save_file(
        {name: tensor.contiguous() for name, tensor in trained.weights.items()},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    expected = oracle.get_outputs(
        replace(setup, model_path=str(tmp_path), lora=LoraSpec()), batch, HeadOutput.LOGPROB
    )
    assert_close(trained.logprobs, expected, LOGPROB, quantity="log-probs", batch=batch)


@every_adapter
def test_disabled_adapter_gives_base_logprobs(
    trained: "TrainedAdapter", oracle: OracleCache, adapter: TinyAdapter
) -> None:
    """Inside `disable_adapter` log-probs are the base's, before and after training.

    The adapter is active again outside.
    """
    setup, batch = get_trained_case(oracle, adapter)
    base = oracle.get_outputs(replace(setup, lora=LoraSpec()), batch, HeadOutput.LOGPROB)
    assert_close(
        trained.disabled_before,
        base,
        LOGPROB,
        quantity="log-probs without the adapter",
        batch=batch,
    )
    assert trained.disabled_after.equal(trained.disabled_before), (
        "training an adapter changed the base"
    )
    # Without this check, an adapter that is never applied would pass the comparisons above.
    assert float((trained.logprobs - base).abs().max()) > 0.01, (
        "the adapter does not change the log-probs"
    )
    assert trained.logprobs_again.equal(trained.logprobs), (
        "the adapter did not come back after disable_adapter()"
    )


class TrainedAdapter:
    """Measurements of an engine with an adapter, before and after one update."""

    def __init__(self, engine: BaseEngine, *, batch: SequenceBatch) -> None:
        with engine.disable_adapter():
            self.disabled_before = compute_logprobs(engine, batch)
        train(engine, [batch])
        self.logprobs = compute_logprobs(engine, batch)
        with engine.disable_adapter():
            self.disabled_after = compute_logprobs(engine, batch)
        self.logprobs_again = compute_logprobs(engine, batch)
        self.adapter = engine.export_adapter()
        self.weights = collect_weights(engine)


def compute_logprobs(engine: BaseEngine, batch: SequenceBatch) -> Tensor:
    """Return log-probs [T] in batch order."""
    with engine.eval_mode():
        result = engine.forward_backward_batch(
            rank_slice(engine, batch, split=ONE_MICRO_BATCH),
            forward_only=True,
            outputs=[HeadOutput.LOGPROB],
        )
    return engine.unshard_outputs(result.outputs, sample_ids=batch.sample_ids).columns[
        HeadOutput.LOGPROB
    ]


def train_adapter(rank: Rank, *, setup: EngineSetup, batch: SequenceBatch) -> TrainedAdapter:
    """Train an adapter in a temporary engine."""
    return TrainedAdapter(rank.temporary_engine(setup), batch=batch)


def test_adapter_checkpoint_resumes_bitwise(
    engine_under_test: EngineUnderTest, oracle: OracleCache, tmp_path: Path
) -> None:
    """Resuming from an adapter's checkpoint gives the next update bit for bit."""
    schedule = ScheduleSpec(kind="cosine", warmup_steps=1, total_steps=6)
    setup = oracle.make_adapter_setup(PLAIN, optimizer=ADAMW, schedule=schedule)
    batches = [oracle.get_batch(seed=seed) for seed in range(3)]
    uninterrupted = engine_under_test.run(train_without_stop, setup=setup, batches=batches)[0]
    engine_under_test.run(train_and_save, setup=setup, batches=batches[:2], folder=tmp_path, step=2)
    resumed = engine_under_test.run(
        load_and_train, setup=setup, batches=batches[2:], folder=tmp_path
    )[0]
    assert_same_state(resumed[0].state, uninterrupted[2].state)
    assert (resumed[0].grad_norm, resumed[0].next_lr) == (
        uninterrupted[2].grad_norm,
        uninterrupted[2].next_lr,
    )


def test_checkpoint_contains_only_the_adapter(
    engine_under_test: EngineUnderTest, oracle: OracleCache, tmp_path: Path
) -> None:
    """A checkpoint holds the adapter in PEFT's format and no weights of the frozen base.

    Search all checkpoint files for an embedding row.
    """
    setup = oracle.make_adapter_setup(ATTENTION, optimizer=ADAMW)
    step = Path(
        engine_under_test.run(
            train_and_save, setup=setup, batches=[oracle.get_batch()], folder=tmp_path, step=1
        )[0]
    )
    state = engine_under_test.run(train_without_stop, setup=setup, batches=[oracle.get_batch()])[0][
        0
    ].state
    _, tensors = read_adapter(step / "engine" / "adapter")
    assert_all_equal(
        tensors, {name: entry.master for name, entry in state.items()}, quantity="adapter"
    )
    # 32 random float32 numbers in a row do not occur in a file by chance.
    row = (
        load_file(Path(setup.model_path) / "model.safetensors")["model.embed_tokens.weight"][7]
        .numpy()
        .tobytes()
    )
    files_with_base = [
        path.name for path in step.rglob("*") if path.is_file() and row in path.read_bytes()
    ]
    assert not files_with_base, (
        f"{', '.join(files_with_base)} contains weights of the frozen base; save only the adapter"
    )


def test_load_adapter_replaces_the_adapter(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """`load_adapter` replaces the adapter that forward passes use and that is exported."""
    setup, batch = oracle.make_adapter_setup(PLAIN), oracle.get_batch()
    other = oracle.make_adapter_setup(PLAIN, seed=1)
    content = read_adapter(Path(str(other.lora.path)))
    logprobs, exported = engine_under_test.run(
        logprobs_with_adapter, setup=setup, content=content, batch=batch
    )[0]
    assert_all_equal(exported, content[1], quantity="adapter exported after load_adapter")
    expected = oracle.get_outputs(other, batch, HeadOutput.LOGPROB)
    assert_logprobs(engine_under_test, logprobs, expected, batch=batch)


def logprobs_with_adapter(
    rank: Rank,
    *,
    setup: EngineSetup,
    content: tuple[dict[str, object], dict[str, Tensor]],
    batch: SequenceBatch,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Load an adapter into an engine that has another one; return log-probs and the adapter."""
    engine = rank.temporary_engine(setup)
    engine.load_adapter(*content)
    return compute_logprobs(engine, batch), dict(engine.export_adapter()[1])


def test_invalid_adapter_is_rejected_without_changes(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Missing, unknown or misshapen tensors and another `lora_alpha` raise; nothing changes."""
    setup = oracle.make_adapter_setup(PLAIN)
    engine_under_test.run(load_invalid_adapters, setup=setup)


def load_invalid_adapters(rank: Rank, *, setup: EngineSetup) -> None:
    """Try each invalid adapter and compare the adapter before and after."""
    engine = rank.cached_engine(setup)
    config, before = engine.export_adapter()
    name = next(iter(before))
    # Other values than those loaded, so that a load which fails halfway shows in the export.
    altered = {key: tensor + 1 for key, tensor in before.items()}
    invalid = [
        {key: tensor for key, tensor in altered.items() if key != name},
        {**altered, "base_model.model.unknown.lora_A.weight": altered[name]},
        {**altered, name: altered[name][:1]},
    ]
    for tensors in invalid:
        with pytest.raises(WeightError):
            engine.load_adapter(config, tensors)
    with pytest.raises(ConfigError, match="lora_alpha"):
        engine.load_adapter({**config, "lora_alpha": 7}, altered)
    assert_all_equal(dict(engine.export_adapter()[1]), dict(before), quantity="adapter")


def test_adapter_dropout_is_off_in_eval(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Dropout of the adapter is inactive in `eval_mode`, or the layout rejects it by name.

    A layout that cannot have dropout must name `lora.dropout` and the setting it conflicts with.
    """
    # Half of the inputs, so that active dropout makes two passes differ.
    setup, batch = oracle.make_adapter_setup(PLAIN, dropout=0.5), oracle.get_batch()
    messages = set(engine_under_test.run(read_dropout_error, setup=setup))
    assert len(messages) == 1, f"ranks raise different errors: {messages}"
    if message := messages.pop():
        # A layout may reject dropout if the message names the setting that conflicts with it.
        assert "lora.dropout" in message, message
        assert any(name in message for name in engine_under_test.layout.fields), message
        return
    first, second = (
        engine_under_test.run(measure_logprobs, setup=setup, batch=batch)[0] for _ in range(2)
    )
    assert first.equal(second)
    expected = oracle.get_outputs(oracle.make_adapter_setup(PLAIN), batch, HeadOutput.LOGPROB)
    assert_logprobs(engine_under_test, first, expected, batch=batch)


def test_evaluation_after_training_has_no_dropout(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Check that dropout of the adapter is off in `eval_mode` after an update, too.

    It was on in that update: an engine that stays in training mode passes every test that only
    evaluates.
    """
    setup, batch = oracle.make_adapter_setup(PLAIN, dropout=0.5), oracle.get_batch()
    # A layout may reject dropout; test_adapter_dropout_is_off_in_eval checks its message.
    if any(engine_under_test.run(read_dropout_error, setup=setup)):
        return
    logprobs = engine_under_test.run(logprobs_after_an_update, setup=setup, batch=batch)[0]
    # The optimizer's learning rate is 0.
    expected = oracle.get_outputs(oracle.make_adapter_setup(PLAIN), batch, HeadOutput.LOGPROB)
    assert_logprobs(engine_under_test, logprobs, expected, batch=batch)


def test_adapter_dropout_is_on_in_training(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Dropout of the adapter changes the gradient, unless the layout rejects it."""
    batch, setups = (
        oracle.get_batch(),
        [oracle.make_adapter_setup(PLAIN, dropout=dropout) for dropout in (0.0, 0.5)],
    )
    if any(engine_under_test.run(read_dropout_error, setup=setups[1])):
        return
    without, with_dropout = (
        engine_under_test.run(
            measure_update, setup=setup, objective=ClippedPpoProbe(), batch=batch
        )[0].grad_norm
        for setup in setups
    )
    # Half of the inputs are dropped, and the others are doubled.
    assert abs(with_dropout - without) > 0.01 * without


def logprobs_after_an_update(rank: Rank, *, setup: EngineSetup, batch: SequenceBatch) -> Tensor:
    """Run one update, then evaluate."""
    train(rank.cached_engine(setup), [batch])
    return measure_logprobs(rank, setup=setup, batch=batch)


def read_dropout_error(rank: Rank, *, setup: EngineSetup) -> str:
    """Return the error message; empty if the engine was built."""
    try:
        rank.cached_engine(setup)
    except ConfigError as error:
        return str(error)
    return ""


def test_backward_with_disabled_adapter_is_rejected(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """A backward pass inside `disable_adapter` raises EngineStateError; outside it works."""
    engine_under_test.run(
        train_with_disabled_adapter,
        setup=oracle.make_adapter_setup(PLAIN),
        batch=oracle.get_batch(),
    )


def train_with_disabled_adapter(rank: Rank, *, setup: EngineSetup, batch: SequenceBatch) -> None:
    """Try a backward pass inside `disable_adapter`, then outside."""
    engine = rank.cached_engine(setup)
    engine.set_loss_fn(ClippedPpoProbe())
    local_batch = rank_slice(engine, batch, split=ONE_MICRO_BATCH)
    with engine.train_mode():
        with engine.disable_adapter(), pytest.raises(EngineStateError, match="disable_adapter"):
            engine.forward_backward_batch(local_batch, forward_only=False)
        engine.forward_backward_batch(local_batch, forward_only=False)
    assert engine.optimizer_step() > 0


def test_nested_disable_adapter_keeps_the_adapter_disabled(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """After an inner `disable_adapter` the outer one still disables the adapter and training."""
    for before, after in engine_under_test.run(
        disable_twice,
        setup=oracle.make_adapter_setup(PLAIN, optimizer=ADAMW),
        batch=oracle.get_batch(),
    ):
        assert after.equal(before), "the adapter came back at the end of the inner context"


def disable_twice(rank: Rank, *, setup: EngineSetup, batch: SequenceBatch) -> tuple[Tensor, Tensor]:
    """Return log-probs without the adapter, before and after an inner context."""
    engine = rank.temporary_engine(setup)
    # A new adapter is 0 and has no effect, so train it first.
    train(engine, [batch])
    with engine.disable_adapter():
        before = compute_logprobs(engine, batch)
        with engine.disable_adapter():
            pass
        after = compute_logprobs(engine, batch)
        engine.optimizer_zero_grad()
        with engine.train_mode(), pytest.raises(EngineStateError, match="disable_adapter"):
            engine.forward_backward_batch(
                rank_slice(engine, batch, split=ONE_MICRO_BATCH), forward_only=False
            )
    return before, after


def test_adapter_calls_without_an_adapter_are_rejected(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """An engine without an adapter raises EngineStateError from all adapter methods."""
    engine_under_test.run(call_without_adapter, setup=oracle.make_setup(QWEN2_GROUPED))


def call_without_adapter(rank: Rank, *, setup: EngineSetup) -> None:
    """Call each adapter method on an engine that has none."""
    engine = rank.cached_engine(setup)
    with pytest.raises(EngineStateError, match="no adapter"), engine.disable_adapter():
        pass
    with pytest.raises(EngineStateError, match="no adapter"):
        engine.export_adapter()
    with pytest.raises(EngineStateError, match="no adapter"):
        engine.load_adapter({}, {})
