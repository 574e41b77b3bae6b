"""Conformance tests on models of current families; run the families that `--families` names."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

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
    run_update,
    train_and_save,
)
from temper_engine_api.conformance.harness.rank import ADAMW, EngineSetup, Rank
from temper_engine_api.conformance.harness.tolerances import (
    LOGPROB,
    UPDATE,
    assert_all_close,
    assert_all_equal,
    assert_close,
    get_family_gradient,
    get_family_logprob,
)
from temper_engine_api.conformance.inputs.model_families import FAMILIES, has_smooth_gradient
from temper_engine_api.conformance.inputs.probes import ClippedPpoProbe
from temper_engine_api.conformance.inputs.tiny_adapters import TinyAdapter
from temper_engine_api.conformance.inputs.tiny_models import get_auto_class
from temper_engine_api.conformance.oracle.oracle_cache import MOE_TARGET_MODULES, OracleCache
from temper_engine_api.conformance.oracle.oracle_comparison import check_outputs, check_update
from temper_engine_api.objective import HeadOutput
from temper_engine_api.weights import NamedWeight

NUM_UPDATES = 5
SMALL_ADAMW = replace(ADAMW, lr=1e-3)
"""Learning rate 1e-2 changes linear attention states so much that rounding errors grow every
step."""


def make_setup(oracle: OracleCache, family: str, **fields: object) -> EngineSetup:
    return oracle.make_setup(FAMILIES[family], **fields)


def make_gradient_setup(oracle: OracleCache, family: str) -> EngineSetup:
    """Return the setup for one update; in the dtype of the run if that can be compared."""
    return make_setup(oracle, family, compute=None if has_smooth_gradient(family) else "fp32")


def get_batch(oracle: OracleCache, family: str, *, seed: int = 0) -> SequenceBatch:
    """Return sequences of odd lengths; their old log-probs come from the family's model."""
    return oracle.get_batch(model=FAMILIES[family], seed=seed)


def test_family_outputs_match_transformers(
    engine_under_test: EngineUnderTest, oracle: OracleCache, family: str
) -> None:
    """Packed log-probs and entropies equal transformers' own, one sequence at a time."""
    setup, batch = make_setup(oracle, family), get_batch(oracle, family)
    requested = [HeadOutput.LOGPROB, HeadOutput.ENTROPY]
    for split in (ONE_MICRO_BATCH, TWO_MICRO_BATCHES):
        check_outputs(
            engine_under_test,
            oracle,
            setup=setup,
            batch=batch,
            head_outputs=requested,
            split=split,
            tolerance=get_family_logprob(family),
        )


def test_family_gradient_matches_transformers(
    engine_under_test: EngineUnderTest, oracle: OracleCache, family: str
) -> None:
    """Loss and every gradient equal transformers', also at temperature 1 everywhere."""
    setup, tempered = make_gradient_setup(oracle, family), get_batch(oracle, family)
    plain = replace(tempered, temperature=torch.ones_like(tempered.temperature))
    for split, batch in ((ONE_MICRO_BATCH, tempered), (TWO_MICRO_BATCHES, plain)):
        check_update(
            engine_under_test,
            oracle,
            setup=setup,
            objective=ClippedPpoProbe(),
            batch=batch,
            split=split,
            tolerance=get_family_gradient(family),
        )


def test_five_updates_of_family_match_adamw(
    engine_under_test: EngineUnderTest, oracle: OracleCache, family: str
) -> None:
    """Five AdamW updates give the weights and norms of transformers with a plain AdamW."""
    # In float32, because rounding grows with each update.
    setup = make_setup(oracle, family, optimizer=SMALL_ADAMW, compute="fp32")
    batches = [get_batch(oracle, family, seed=seed) for seed in range(NUM_UPDATES)]
    expected = oracle.run(
        measure_updates, setup=setup, objective=ClippedPpoProbe(), batches=batches
    )
    updates = engine_under_test.run(
        measure_updates, setup=setup, objective=ClippedPpoProbe(), batches=batches
    )[0]
    for update, expected_update in zip(updates, expected, strict=True):
        # Not tighter than the gradients themselves, whose rounding grows in linear attention.
        tolerance = max(UPDATE, get_family_gradient(family), key=lambda t: t.relative)
        assert_close(
            update.grad_norm, expected_update.grad_norm, tolerance, quantity="gradient norm"
        )
    assert_all_close(
        updates[-1].masters, expected[-1].masters, UPDATE, quantity="weights after five updates"
    )


def test_exported_family_loads_in_transformers(
    engine_under_test: EngineUnderTest, oracle: OracleCache, family: str, tmp_path: Path
) -> None:
    """Weights are exported as in the files, also after an update, and transformers loads them."""
    # In float32, because an engine with bf16 compute exports rounded weights.
    setup = make_setup(oracle, family, optimizer=ADAMW, compute="fp32")
    batch = get_batch(oracle, family)
    before, after, logprobs = engine_under_test.run(export_around_update, setup=setup, batch=batch)[
        0
    ]
    on_disk = load_file(Path(setup.model_path) / "model.safetensors")
    assert_all_equal(before, on_disk, quantity="weights")
    config = AutoConfig.from_pretrained(setup.model_path)
    config.save_pretrained(tmp_path)
    save_file(after, tmp_path / "model.safetensors", metadata={"format": "pt"})
    _, report = get_auto_class(config).from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    exported = EngineSetup(model_path=str(tmp_path), compute="fp32")
    assert_close(
        logprobs,
        oracle.get_outputs(exported, batch, HeadOutput.LOGPROB),
        LOGPROB,
        quantity="log-probs of the exported weights",
        batch=batch,
    )


def export_around_update(
    rank: Rank, *, setup: EngineSetup, batch: SequenceBatch
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Return the weights before and after an update, and log-probs after loading them again."""
    engine = rank.temporary_engine(setup)
    before = collect_weights(engine)
    engine.set_loss_fn(ClippedPpoProbe())
    local_batch = rank_slice(engine, batch, split=ONE_MICRO_BATCH)
    run_update(engine, [local_batch])
    after = collect_weights(engine)
    engine.load_weights(NamedWeight(name, tensor) for name, tensor in before.items())
    assert_all_equal(collect_weights(engine), before, quantity="weights that were loaded")
    engine.load_weights(NamedWeight(name, tensor) for name, tensor in reversed(after.items()))
    with engine.eval_mode():
        result = engine.forward_backward_batch(
            local_batch, forward_only=True, outputs=[HeadOutput.LOGPROB]
        )
    outputs = engine.unshard_outputs(result.outputs, sample_ids=batch.sample_ids)
    return before, after, outputs.columns[HeadOutput.LOGPROB]


@pytest.mark.if_claimed(Capability.ADAPTER)
def test_family_adapter_matches_oracle(
    engine_under_test: EngineUnderTest, oracle: OracleCache, family: str
) -> None:
    """LoRA gradients on the attention layers equal those from transformers with PEFT."""
    setup = replace(
        oracle.make_adapter_setup(make_adapter(family)),
        compute=make_gradient_setup(oracle, family).compute,
    )
    batch = get_batch(oracle, family)
    expected = oracle.get_update(setup, ClippedPpoProbe(), batch)
    updates = engine_under_test.run(
        measure_update, setup=setup, objective=ClippedPpoProbe(), batch=batch
    )
    assert_all_close(
        updates[0].gradients, expected.gradients, get_family_gradient(family), quantity="gradient"
    )


def make_adapter(family: str) -> TinyAdapter:
    """Return an adapter on the projections in all attention layers of a family."""
    # Without out_proj, which PEFT refuses in Mamba layers.
    linear = ("in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_a", "in_proj")
    latent = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
    fields: dict[str, object] = {"target_modules": [*MOE_TARGET_MODULES, *linear, *latent]}
    if "vision_config" in FAMILIES[family].architecture:
        fields["exclude_modules"] = r"model\.(?!language_model\.).*"
    return TinyAdapter(name=f"family-{family}", model=FAMILIES[family], fields=fields)


@pytest.mark.thorough
def test_family_resumes_after_save(
    engine_under_test: EngineUnderTest, oracle: OracleCache, family: str, tmp_path: Path
) -> None:
    """A run that was saved and loaded continues with the same weights, bit for bit."""
    setup = make_setup(oracle, family, optimizer=ADAMW)
    batches = [get_batch(oracle, family, seed=seed) for seed in range(2)]
    step = engine_under_test.run(
        train_and_save, setup=setup, batches=batches, folder=tmp_path, step=1
    )[0]
    resumed, again = (
        engine_under_test.run(load_and_train, setup=setup, batches=batches, folder=Path(step))[0]
        for _ in range(2)
    )
    full = engine_under_test.run(
        measure_updates, setup=setup, objective=ClippedPpoProbe(), batches=[*batches, *batches]
    )[0]
    assert_all_equal(resumed[-1].masters, again[-1].masters, quantity="weights")
    assert_all_equal(resumed[-1].masters, full[-1].masters, quantity="weights after the resume")
