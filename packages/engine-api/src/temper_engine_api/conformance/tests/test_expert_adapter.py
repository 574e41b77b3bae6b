"""Conformance tests of adapters inside MoE experts.

transformers keeps the matrices for all experts in a layer in one tensor, and PEFT adapts that
tensor.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import save_file
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.capabilities import Capability
from temper_engine_api.conformance.harness.engine_under_test import EngineUnderTest
from temper_engine_api.conformance.harness.measurements import (
    ONE_MICRO_BATCH,
    TWO_MICRO_BATCHES,
    collect_weights,
    load_and_train,
    measure_outputs,
    train_and_save,
    train_without_stop,
)
from temper_engine_api.conformance.harness.rank import ADAMW, EngineSetup, Rank
from temper_engine_api.conformance.harness.tolerances import (
    LOGPROB,
    LOSS,
    assert_all_close,
    assert_all_equal,
    assert_close,
    assert_same_state,
    get_family_logprob,
)
from temper_engine_api.conformance.inputs.model_families import FAMILIES
from temper_engine_api.conformance.inputs.probes import ClippedPpoProbe
from temper_engine_api.conformance.inputs.tiny_adapters import (
    TinyAdapter,
    read_adapter,
    save_adapter,
)
from temper_engine_api.conformance.inputs.tiny_models import QWEN2_GROUPED
from temper_engine_api.conformance.oracle.oracle_cache import OracleCache
from temper_engine_api.conformance.oracle.oracle_comparison import check_update
from temper_engine_api.conformance.tests.test_adapter import (
    TrainedAdapter,
    compute_logprobs,
    export_adapter,
    train_adapter,
)
from temper_engine_api.conformance.tests.test_family import make_adapter
from temper_engine_api.errors import CapabilityError, ConfigError
from temper_engine_api.objective import HeadOutput
from temper_engine_api.specs import LoraSpec, ScheduleSpec

pytestmark = [
    pytest.mark.if_claimed(Capability.ADAPTER, Capability.ADAPTER_ON_EXPERTS),
    pytest.mark.moe,
]

EXPERT_PARAMETERS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
ALL_EXPERT_MATRICES = TinyAdapter(
    name="inside",
    model=QWEN2_GROUPED,
    fields={
        "target_modules": ["q_proj", "o_proj"],
        "target_parameters": list(EXPERT_PARAMETERS),
        "use_rslora": True,
    },
)
FIRST_EXPERT_MATRICES = TinyAdapter(
    name="first-matrices",
    model=QWEN2_GROUPED,
    fields={"target_modules": ["v_proj"], "target_parameters": ["experts.gate_up_proj"]},
)
UNGATED = frozenset({"nemotron_h"})
"""Families whose experts have no gate."""
ADAPTERS = (ALL_EXPERT_MATRICES, FIRST_EXPERT_MATRICES)
every_adapter = pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.name)


@every_adapter
def test_adapter_gradient_matches_oracle(
    engine_under_test: EngineUnderTest, oracle: OracleCache, adapter: TinyAdapter
) -> None:
    """Gradients, loss and norm of an adapter inside experts equal the oracle's, in float32."""
    # Always in float32: in bf16 the router sends some tokens to other experts than the oracle's
    # router does, which moves a large part of those experts' gradients.
    setup, batch = (
        replace(oracle.make_adapter_setup(adapter), compute="fp32"),
        oracle.get_batch(model=adapter.model),
    )
    expected = oracle.get_update(setup, ClippedPpoProbe(), batch)
    assert any(".experts." in name for name in expected.gradients), (
        "the oracle's adapter is not on experts"
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


def test_new_adapter_changes_no_output(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """A newly initialized adapter inside experts leaves log-probs as they are."""
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    fresh = replace(setup, lora=LoraSpec(rank=4, alpha=8.0, target_parameters=EXPERT_PARAMETERS))
    expected = oracle.get_outputs(setup, batch, HeadOutput.LOGPROB)
    outputs = engine_under_test.run(
        measure_outputs, setup=fresh, batch=batch, requested_outputs=[HeadOutput.LOGPROB]
    )[0]
    assert_close(
        outputs.columns[HeadOutput.LOGPROB],
        expected,
        LOGPROB,
        quantity="log-probs",
        batch=batch,
        num_ranks=engine_under_test.num_data_ranks,
    )


@every_adapter
def test_loaded_adapter_is_exported_unchanged(
    engine_under_test: EngineUnderTest, oracle: OracleCache, adapter: TinyAdapter
) -> None:
    """`export_adapter` returns tensors and `target_parameters` of `lora.path` unchanged."""
    setup = oracle.make_adapter_setup(adapter)
    config, on_disk = read_adapter(Path(str(setup.lora.path)))
    for exported_config, tensors in engine_under_test.run(export_adapter, setup=setup):
        assert_all_equal(tensors, on_disk, quantity="adapter")
        assert sorted(exported_config["target_parameters"]) == sorted(config["target_parameters"])  # type: ignore[call-overload]


@pytest.fixture(scope="module")
def trained_adapters() -> dict[str, TrainedAdapter]:
    """Cache trained adapters by engine layout and adapter."""
    return {}


@pytest.fixture
def trained(
    request: pytest.FixtureRequest,
    engine_under_test: EngineUnderTest,
    oracle: OracleCache,
    adapter: TinyAdapter,
    trained_adapters: dict[str, TrainedAdapter],
) -> TrainedAdapter:
    """Train one adapter for three tests, which have the same parameters."""
    key = request.node.callspec.id
    if key not in trained_adapters:
        setup, batch = (
            oracle.make_adapter_setup(adapter, optimizer=ADAMW),
            oracle.get_batch(model=adapter.model),
        )
        results = engine_under_test.run(train_adapter, setup=setup, batch=batch)
        trained_adapters[key] = results[0]
    return trained_adapters[key]


@every_adapter
def test_adapter_loads_in_peft_with_same_logits(
    trained: TrainedAdapter, oracle: OracleCache, adapter: TinyAdapter, tmp_path: Path
) -> None:
    """A trained and exported adapter gives the same log-probs in PEFT.

    PEFT keeps the factors of all experts in one tensor; the wrong order of experts shows here.
    """
    setup, batch = (
        oracle.make_adapter_setup(adapter, optimizer=ADAMW),
        oracle.get_batch(model=adapter.model),
    )
    folder = save_adapter(*trained.adapter, folder=tmp_path / "adapter")
    expected = oracle.get_outputs(
        replace(setup, lora=LoraSpec(path=str(folder))), batch, HeadOutput.LOGPROB
    )
    assert_close(trained.logprobs, expected, LOGPROB, quantity="log-probs", batch=batch)


@every_adapter
def test_merged_weights_give_same_logits_in_transformers(
    trained: TrainedAdapter, oracle: OracleCache, adapter: TinyAdapter, tmp_path: Path
) -> None:
    """Exported weights include the adapter and give the same log-probs in transformers."""
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
    assert_close(trained.logprobs, expected, LOGPROB, quantity="log-probs", batch=batch)


@every_adapter
def test_disabled_adapter_gives_base_logprobs(
    trained: TrainedAdapter, oracle: OracleCache, adapter: TinyAdapter
) -> None:
    """Inside `disable_adapter` log-probs are the base's; outside the adapter is active again."""
    setup, batch = (
        oracle.make_adapter_setup(adapter, optimizer=ADAMW),
        oracle.get_batch(model=adapter.model),
    )
    base = oracle.get_outputs(replace(setup, lora=LoraSpec()), batch, HeadOutput.LOGPROB)
    assert_close(trained.disabled_after, base, LOGPROB, quantity="log-probs", batch=batch)
    assert trained.logprobs_again.equal(trained.logprobs)


def test_adapter_in_family_experts_is_applied_and_merged(
    engine_under_test: EngineUnderTest, oracle: OracleCache, family: str
) -> None:
    """Adapters in experts equal those of PEFT, in log-probs and in exported weights.

    The experts of a family may be stored transposed, and have no gates or more biases. If an engine
    has no adapters for them, it raises a CapabilityError that names lora.target_parameters.
    """
    setup = replace(oracle.make_adapter_setup(make_expert_adapter(family)), compute="fp32")
    batch = oracle.get_batch(model=FAMILIES[family])
    results = engine_under_test.run(measure_adapted, setup=setup, batch=batch)
    if isinstance(results[0], str):
        assert all("lora.target_parameters" in str(message) for message in results)
        return
    logprobs, weights = results[0]
    expected = oracle.run(measure_adapted, setup=setup, batch=batch)
    assert not isinstance(expected, str)
    expected_logprobs, expected_weights = expected
    assert_close(logprobs, expected_logprobs, get_family_logprob(family), quantity="log-probs")
    assert_all_close(weights, expected_weights, LOGPROB, quantity="merged weights")


def measure_adapted(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch
) -> tuple[Tensor, dict[str, Tensor]] | str:
    """Return log-probs and merged weights of an adapter, or why the engine refuses it."""
    try:
        engine = rank.temporary_engine(setup)
    except CapabilityError as error:
        return str(error)
    return compute_logprobs(engine, batch), collect_weights(engine)


def make_expert_adapter(family: str) -> TinyAdapter:
    """Return an adapter on attention and experts, of which one tensor of each has square matrices.

    A square matrix can be transposed without an error.
    """
    model, outside = FAMILIES[family], make_adapter(family)
    width = model.settings["hidden_size"]
    sizes = {"intermediate_size": width, "moe_intermediate_size": width}
    known = {"moe_intermediate_size"} & model.architecture.keys() | {"intermediate_size"}
    architecture = {**model.architecture, **{name: sizes[name] for name in known}}
    first = "experts.up_proj" if family in UNGATED else "experts.gate_up_proj"
    return TinyAdapter(
        name=f"family-{family}-experts",
        model=replace(model, name=f"{model.name}-square", architecture=architecture),
        fields={**outside.fields, "target_parameters": [first, "experts.down_proj"]},
    )


@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen3_next"])
def test_new_adapter_is_on_all_linear_layers_outside_experts(
    engine_under_test: EngineUnderTest, oracle: OracleCache, model_type: str, tmp_path: Path
) -> None:
    """`all-linear` includes dense MLPs and shared experts; PEFT computes the same from the export.

    PEFT takes the names of these layers for those of experts. An engine without adapters for them
    raises an error that names lora.target_modules.
    """
    setup = replace(
        oracle.make_setup(FAMILIES[model_type], optimizer=ADAMW),
        compute="fp32",
        lora=LoraSpec(rank=4, alpha=8.0),
    )
    batch = oracle.get_batch(model=FAMILIES[model_type])
    trained = engine_under_test.run(train_new_adapter, setup=setup, batch=batch)[0]
    if isinstance(trained, str):
        assert "lora.target_modules" in trained
        return
    _, tensors = trained.adapter
    _, expected_tensors = oracle.run(export_adapter, setup=setup)
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        name: tensor.shape for name, tensor in expected_tensors.items()
    }
    folder = save_adapter(*trained.adapter, folder=tmp_path / "adapter")
    expected = oracle.get_outputs(
        replace(setup, lora=LoraSpec(path=str(folder))), batch, HeadOutput.LOGPROB
    )
    assert_close(
        trained.logprobs,
        expected,
        get_family_logprob(model_type),
        quantity="log-probs",
        batch=batch,
    )


def train_new_adapter(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch
) -> TrainedAdapter | str:
    """Train a new adapter, or return why the engine refuses it."""
    try:
        return train_adapter(rank, setup=setup, batch=batch)
    except (CapabilityError, ConfigError) as error:
        return str(error)


def test_adapter_checkpoint_resumes_bitwise(
    engine_under_test: EngineUnderTest, oracle: OracleCache, tmp_path: Path
) -> None:
    """Resuming from an adapter's checkpoint gives the next update bit for bit."""
    schedule = ScheduleSpec(kind="cosine", warmup_steps=1, total_steps=6)
    setup = oracle.make_adapter_setup(ALL_EXPERT_MATRICES, optimizer=ADAMW, schedule=schedule)
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


def test_unsupported_expert_adapter_is_rejected(
    engine_under_test: EngineUnderTest, oracle: OracleCache
) -> None:
    """Dropout on experts and unknown `target_parameters` raise ConfigError by name."""
    setup = oracle.make_adapter_setup(ALL_EXPERT_MATRICES, dropout=0.5)
    unknown = replace(
        setup, lora=LoraSpec(rank=4, alpha=8.0, target_parameters=("mlp.experts.sideways_proj",))
    )
    assert all(
        "lora.dropout is 0.5" in message
        for message in engine_under_test.run(read_init_error, setup=setup)
    )
    assert all(
        "names mlp.experts.sideways_proj" in message
        for message in engine_under_test.run(read_init_error, setup=unknown)
    )


def read_init_error(rank: Rank, *, setup: EngineSetup) -> str:
    """Return the message of the ConfigError that `init_model` raises."""
    with pytest.raises(ConfigError) as caught:
        rank.temporary_engine(setup)
    return str(caught.value)
