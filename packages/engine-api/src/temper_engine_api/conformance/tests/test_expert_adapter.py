"""Laws: those of adapters where one lies inside experts, on the tensors in which transformers joins the matrices of a layer's experts."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import save_file

from temper_engine_api.capabilities import Capability
from temper_engine_api.conformance.harness.engine_under_test import Subject
from temper_engine_api.conformance.harness.measurements import (
    SPLITS,
    WHOLE,
    load_and_train,
    measure_outputs,
    measure_update,
    merged,
    train_and_save,
)
from temper_engine_api.conformance.harness.rank import TRAINS, Rank, Recipe
from temper_engine_api.conformance.harness.tolerances import (
    GRADIENT,
    LOGPROB,
    LOSS,
    LOSS_TERMS,
    assert_all_close,
    assert_all_equal,
    assert_close,
    assert_same_state,
)
from temper_engine_api.conformance.inputs.probes import TokenProbe
from temper_engine_api.conformance.inputs.tiny_adapters import (
    TinyAdapter,
    read_adapter,
    save_adapter,
)
from temper_engine_api.conformance.inputs.tiny_models import QWEN2_GROUPED
from temper_engine_api.conformance.oracle.oracle_cache import Reference
from temper_engine_api.conformance.tests.test_adapter import (
    Trained,
    kept_adapter,
    train_and_tell,
    train_whole,
)
from temper_engine_api.errors import ConfigError
from temper_engine_api.objective import HeadOutput
from temper_engine_api.specs import LoraSpec, ScheduleSpec

pytestmark = [
    pytest.mark.claims(Capability.ADAPTER, Capability.ADAPTER_ON_EXPERTS),
    pytest.mark.mixtures,
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
def test_gradient_equals_the_oracle_with_the_same_adapter(
    subject: Subject, reference: Reference, adapter: TinyAdapter
) -> None:
    # In bf16 a router sends some tokens to another expert than in float32, and a good part of that expert's gradient with them.
    recipe, batch = (
        replace(reference.adapter_recipe(adapter), compute="fp32"),
        reference.batch(model=adapter.model),
    )
    expected = reference.update(recipe, TokenProbe(), batch)
    assert any(".experts." in name for name in expected.gradients), (
        "the oracle's adapter is not on experts"
    )
    for split in (WHOLE, SPLITS[1]):
        updates = subject.run(
            measure_update, recipe=recipe, objective=TokenProbe(), batch=batch, split=split
        )
        assert_all_close(updates[0].gradients, expected.gradients, GRADIENT, what="gradient")
        assert_close(
            merged(updates)["loss"],
            merged([expected])["loss"],
            LOSS,
            what="loss",
            at_least=LOSS_TERMS,
        )
        assert_close(updates[0].grad_norm, expected.grad_norm, LOSS, what="gradient norm")


def test_a_fresh_adapter_changes_nothing(subject: Subject, reference: Reference) -> None:
    recipe, batch = reference.recipe(QWEN2_GROUPED), reference.batch()
    fresh = replace(recipe, lora=LoraSpec(rank=4, alpha=8.0, target_parameters=BOTH))
    expected = reference.outputs(recipe, batch, HeadOutput.LOGPROB)
    outputs = subject.run(
        measure_outputs, recipe=fresh, batch=batch, requested_outputs=[HeadOutput.LOGPROB]
    )[0]
    assert_close(outputs.columns[HeadOutput.LOGPROB], expected, LOGPROB, what="log-probs")


@every_adapter
def test_a_continued_adapter_comes_out_again_bit_for_bit(
    subject: Subject, reference: Reference, adapter: TinyAdapter
) -> None:
    recipe = reference.adapter_recipe(adapter)
    config, on_disk = read_adapter(Path(str(recipe.lora.path)))
    for described, tensors in subject.run(kept_adapter, recipe=recipe):
        assert_all_equal(tensors, on_disk, what="adapter")
        assert sorted(described["target_parameters"]) == sorted(config["target_parameters"])  # type: ignore[call-overload]


@pytest.fixture(scope="module")
def seen() -> dict[str, Trained]:
    """By engine and adapter."""
    return {}


@pytest.fixture
def trained(
    request: pytest.FixtureRequest,
    subject: Subject,
    reference: Reference,
    adapter: TinyAdapter,
    seen: dict[str, Trained],
) -> Trained:
    """One engine serves three laws; their parameters, which name it, are the same."""
    key = request.node.callspec.id
    if key not in seen:
        recipe, batch = (
            reference.adapter_recipe(adapter, optimizer=TRAINS),
            reference.batch(model=adapter.model),
        )
        seen[key] = subject.run(train_and_tell, recipe=recipe, batches=[batch])[0]
    return seen[key]


@every_adapter
def test_adapter_loads_in_peft_with_same_logits(
    trained: Trained, reference: Reference, adapter: TinyAdapter, tmp_path: Path
) -> None:
    # The oracle loads the directory with PeftModel.from_pretrained.
    recipe, batch = (
        reference.adapter_recipe(adapter, optimizer=TRAINS),
        reference.batch(model=adapter.model),
    )
    folder = save_adapter(*trained.adapter, folder=tmp_path / "adapter")
    expected = reference.outputs(
        replace(recipe, lora=LoraSpec(path=str(folder))), batch, HeadOutput.LOGPROB
    )
    assert_close(trained.logprobs, expected, LOGPROB, what="log-probs")


@every_adapter
def test_merged_weights_give_same_logits_in_transformers(
    trained: Trained, reference: Reference, adapter: TinyAdapter, tmp_path: Path
) -> None:
    recipe, batch = (
        reference.adapter_recipe(adapter, optimizer=TRAINS),
        reference.batch(model=adapter.model),
    )
    shutil.copy(Path(recipe.model_path) / "config.json", tmp_path)
    save_file(
        {name: tensor.contiguous() for name, tensor in trained.weights.items()},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    expected = reference.outputs(
        replace(recipe, model_path=str(tmp_path), lora=LoraSpec()), batch, HeadOutput.LOGPROB
    )
    assert_close(trained.logprobs, expected, LOGPROB, what="log-probs")


@every_adapter
def test_disabled_adapter_is_the_base(
    trained: Trained, reference: Reference, adapter: TinyAdapter
) -> None:
    recipe, batch = (
        reference.adapter_recipe(adapter, optimizer=TRAINS),
        reference.batch(model=adapter.model),
    )
    base = reference.outputs(replace(recipe, lora=LoraSpec()), batch, HeadOutput.LOGPROB)
    assert_close(trained.disabled_after, base, LOGPROB, what="log-probs")
    assert trained.logprobs_again.equal(trained.logprobs)


def test_an_adapter_checkpoint_resumes_bitwise(
    subject: Subject, reference: Reference, tmp_path: Path
) -> None:
    schedule = ScheduleSpec(kind="cosine", warmup_steps=1, total_steps=6)
    recipe = reference.adapter_recipe(INSIDE, optimizer=TRAINS, schedule=schedule)
    batches = [reference.batch(seed=seed) for seed in range(3)]
    whole = subject.run(train_whole, recipe=recipe, batches=batches)[0]
    subject.run(train_and_save, recipe=recipe, batches=batches[:2], folder=tmp_path, step=2)
    resumed = subject.run(load_and_train, recipe=recipe, batches=batches[2:], folder=tmp_path)[0]
    assert_same_state(resumed[0].state, whole[2].state)
    assert (resumed[0].grad_norm, resumed[0].next_lr) == (whole[2].grad_norm, whole[2].next_lr)


def test_what_peft_does_not_have_on_experts_is_refused(
    subject: Subject, reference: Reference
) -> None:
    recipe = reference.adapter_recipe(INSIDE, dropout=0.5)
    unknown = replace(
        recipe, lora=LoraSpec(rank=4, alpha=8.0, target_parameters=("mlp.experts.sideways_proj",))
    )
    assert all("lora.dropout is 0.5" in told for told in subject.run(refusal_of, recipe=recipe))
    assert all(
        "names mlp.experts.sideways_proj" in told
        for told in subject.run(refusal_of, recipe=unknown)
    )


def refusal_of(rank: Rank, *, recipe: Recipe) -> str:
    """What ``init_model`` says."""
    with pytest.raises(ConfigError) as caught:
        rank.engine(recipe)
    return str(caught.value)
