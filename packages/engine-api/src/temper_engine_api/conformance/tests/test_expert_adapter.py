"""Laws: those of adapters where one lies inside experts, on the tensors in which transformers joins the matrices of a layer's experts."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import save_file

from temper_engine_api.capabilities import Capability
from temper_engine_api.conformance.harness.engine_under_test import EngineUnderTest
from temper_engine_api.conformance.harness.measurements import (
    ONE_MICRO_BATCH,
    TWO_MICRO_BATCHES,
    load_and_train,
    measure_outputs,
    measure_update,
    merge_update_metrics,
    train_and_save,
)
from temper_engine_api.conformance.harness.rank import ADAMW, EngineSetup, Rank
from temper_engine_api.conformance.harness.tolerances import (
    GRADIENT,
    LOGPROB,
    LOSS,
    LOSS_TERM_SCALE,
    assert_all_close,
    assert_all_equal,
    assert_close,
    assert_same_state,
)
from temper_engine_api.conformance.inputs.probes import ClippedPpoProbe
from temper_engine_api.conformance.inputs.tiny_adapters import (
    TinyAdapter,
    read_adapter,
    save_adapter,
)
from temper_engine_api.conformance.inputs.tiny_models import QWEN2_GROUPED
from temper_engine_api.conformance.oracle.oracle_cache import OracleCache
from temper_engine_api.conformance.tests.test_adapter import (
    TrainedAdapter,
    export_adapter,
    train_adapter,
    train_without_stop,
)
from temper_engine_api.errors import ConfigError
from temper_engine_api.objective import HeadOutput
from temper_engine_api.specs import LoraSpec, ScheduleSpec

pytestmark = [
    pytest.mark.if_claimed(Capability.ADAPTER, Capability.ADAPTER_ON_EXPERTS),
    pytest.mark.moe,
]

BOTH = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
INSIDE = TinyAdapter(
    name="inside",
    model=QWEN2_GROUPED,
    fields={
        "target_modules": ["q_proj", "o_proj"],
        "target_parameters": list(BOTH),
        "use_rslora": True,
    },
)
FIRST = TinyAdapter(
    name="first-matrices",
    model=QWEN2_GROUPED,
    fields={"target_modules": ["v_proj"], "target_parameters": ["experts.gate_up_proj"]},
)
ADAPTERS = (INSIDE, FIRST)
every_adapter = pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.name)


@every_adapter
def test_adapter_gradient_matches_oracle(
    engine_under_test: EngineUnderTest, oracle: OracleCache, adapter: TinyAdapter
) -> None:
    # In bf16 a router sends some tokens to another expert than in float32, and a good part of that expert's gradient with them.
    setup, batch = (
        replace(oracle.make_adapter_setup(adapter), compute="fp32"),
        oracle.get_batch(model=adapter.model),
    )
    expected = oracle.get_update(setup, ClippedPpoProbe(), batch)
    assert any(".experts." in name for name in expected.gradients), (
        "the oracle's adapter is not on experts"
    )
    for split in (ONE_MICRO_BATCH, TWO_MICRO_BATCHES):
        updates = engine_under_test.run(
            measure_update, setup=setup, objective=ClippedPpoProbe(), batch=batch, split=split
        )
        assert_all_close(updates[0].gradients, expected.gradients, GRADIENT, what="gradient")
        assert_close(
            merge_update_metrics(updates)["loss"],
            merge_update_metrics([expected])["loss"],
            LOSS,
            what="loss",
            min_scale=LOSS_TERM_SCALE,
        )
        assert_close(updates[0].grad_norm, expected.grad_norm, LOSS, what="gradient norm")


def test_new_adapter_changes_no_output(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    fresh = replace(setup, lora=LoraSpec(rank=4, alpha=8.0, target_parameters=BOTH))
    expected = oracle.get_outputs(setup, batch, HeadOutput.LOGPROB)
    outputs = engine_under_test.run(
        measure_outputs, setup=fresh, batch=batch, requested_outputs=[HeadOutput.LOGPROB]
    )[0]
    assert_close(outputs.columns[HeadOutput.LOGPROB], expected, LOGPROB, what="log-probs")


@every_adapter
def test_loaded_adapter_is_exported_unchanged(
    engine_under_test: EngineUnderTest, oracle: OracleCache, adapter: TinyAdapter
) -> None:
    setup = oracle.make_adapter_setup(adapter)
    config, on_disk = read_adapter(Path(str(setup.lora.path)))
    for described, tensors in engine_under_test.run(export_adapter, setup=setup):
        assert_all_equal(tensors, on_disk, what="adapter")
        assert sorted(described["target_parameters"]) == sorted(config["target_parameters"])  # type: ignore[call-overload]


@pytest.fixture(scope="module")
def seen() -> dict[str, TrainedAdapter]:
    """By engine and adapter."""
    return {}


@pytest.fixture
def trained(
    request: pytest.FixtureRequest,
    engine_under_test: EngineUnderTest,
    oracle: OracleCache,
    adapter: TinyAdapter,
    seen: dict[str, TrainedAdapter],
) -> TrainedAdapter:
    """One engine serves three laws; their parameters, which name it, are the same."""
    key = request.node.callspec.id
    if key not in seen:
        setup, batch = (
            oracle.make_adapter_setup(adapter, optimizer=ADAMW),
            oracle.get_batch(model=adapter.model),
        )
        seen[key] = engine_under_test.run(train_adapter, setup=setup, batches=[batch])[0]
    return seen[key]


@every_adapter
def test_adapter_loads_in_peft_with_same_logits(
    trained: TrainedAdapter, oracle: OracleCache, adapter: TinyAdapter, tmp_path: Path
) -> None:
    # The oracle loads the directory with PeftModel.from_pretrained.
    setup, batch = (
        oracle.make_adapter_setup(adapter, optimizer=ADAMW),
        oracle.get_batch(model=adapter.model),
    )
    folder = save_adapter(*trained.adapter, folder=tmp_path / "adapter")
    expected = oracle.get_outputs(
        replace(setup, lora=LoraSpec(path=str(folder))), batch, HeadOutput.LOGPROB
    )
    assert_close(trained.logprobs, expected, LOGPROB, what="log-probs")


@every_adapter
def test_merged_weights_give_same_logits_in_transformers(
    trained: TrainedAdapter, oracle: OracleCache, adapter: TinyAdapter, tmp_path: Path
) -> None:
    setup, batch = (
        oracle.make_adapter_setup(adapter, optimizer=ADAMW),
        oracle.get_batch(model=adapter.model),
    )
    shutil.copy(Path(setup.model_path) / "config.json", tmp_path)
    save_file(
        {name: tensor.contiguous() for name, tensor in trained.weights.items()},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    expected = oracle.get_outputs(
        replace(setup, model_path=str(tmp_path), lora=LoraSpec()), batch, HeadOutput.LOGPROB
    )
    assert_close(trained.logprobs, expected, LOGPROB, what="log-probs")


@every_adapter
def test_disabled_adapter_gives_base_logprobs(
    trained: TrainedAdapter, oracle: OracleCache, adapter: TinyAdapter
) -> None:
    setup, batch = (
        oracle.make_adapter_setup(adapter, optimizer=ADAMW),
        oracle.get_batch(model=adapter.model),
    )
    base = oracle.get_outputs(replace(setup, lora=LoraSpec()), batch, HeadOutput.LOGPROB)
    assert_close(trained.disabled_after, base, LOGPROB, what="log-probs")
    assert trained.logprobs_again.equal(trained.logprobs)


def test_adapter_checkpoint_resumes_bitwise(
    engine_under_test: EngineUnderTest, oracle: OracleCache, tmp_path: Path
) -> None:
    schedule = ScheduleSpec(kind="cosine", warmup_steps=1, total_steps=6)
    setup = oracle.make_adapter_setup(INSIDE, optimizer=ADAMW, schedule=schedule)
    batches = [oracle.get_batch(seed=seed) for seed in range(3)]
    whole = engine_under_test.run(train_without_stop, setup=setup, batches=batches)[0]
    engine_under_test.run(train_and_save, setup=setup, batches=batches[:2], folder=tmp_path, step=2)
    resumed = engine_under_test.run(
        load_and_train, setup=setup, batches=batches[2:], folder=tmp_path
    )[0]
    assert_same_state(resumed[0].state, whole[2].state)
    assert (resumed[0].grad_norm, resumed[0].next_lr) == (whole[2].grad_norm, whole[2].next_lr)


def test_unsupported_expert_adapter_is_rejected(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    setup = oracle.make_adapter_setup(INSIDE, dropout=0.5)
    unknown = replace(
        setup, lora=LoraSpec(rank=4, alpha=8.0, target_parameters=("mlp.experts.sideways_proj",))
    )
    assert all(
        "lora.dropout is 0.5" in told for told in engine_under_test.run(refusal_of, setup=setup)
    )
    assert all(
        "names mlp.experts.sideways_proj" in told
        for told in engine_under_test.run(refusal_of, setup=unknown)
    )


def refusal_of(rank: Rank, *, setup: EngineSetup) -> str:
    """What ``init_model`` says."""
    with pytest.raises(ConfigError) as caught:
        rank.temporary_engine(setup)
    return str(caught.value)
