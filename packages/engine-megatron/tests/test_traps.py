"""Test the places where Megatron gives wrong numbers without an error, one test each.

The conformance tests cover most of them in more layouts; here each comment says what goes wrong.
"""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from temper_engine_api.conformance.harness.engine_under_test import EngineUnderTest
from temper_engine_api.conformance.harness.measurements import (
    ONE_MICRO_BATCH,
    Split,
    collect_state,
    collect_weights,
    measure_outputs,
    measure_update,
    measure_updates,
    rank_slice,
    run_update,
)
from temper_engine_api.conformance.harness.rank import ADAMW, EngineSetup
from temper_engine_api.conformance.harness.tolerances import (
    GRADIENT,
    LOGPROB,
    LOSS,
    UPDATE,
    assert_all_close,
    assert_all_equal,
    assert_close,
)
from temper_engine_api.conformance.inputs.failing_probe import InjectedError
from temper_engine_api.conformance.inputs.probes import ClippedPpoProbe
from temper_engine_api.conformance.inputs.tiny_models import QWEN2_GROUPED, QWEN2_TIED, QWEN2_UNTIED
from temper_engine_api.layout import default_layout
from temper_engine_api.objective import HeadOutput
from temper_engine_api.registry import load_conformance_layouts
from temper_engine_megatron.engine import MegatronEngine

LAYOUTS = {
    layout.name: layout
    for layout in (default_layout(1), default_layout(2), *load_conformance_layouts("megatron"))
}
TWO = Split(name="two", min_micro_batches=2)


@pytest.fixture
def engine_in_layout(rank_pool):
    def make(name):
        layout = LAYOUTS[name]
        return EngineUnderTest(
            engine="megatron",
            capabilities=MegatronEngine.capabilities,
            layout=layout,
            all_layouts=(layout,),
            rank_pool=rank_pool,
        )

    return make


# Nightly: interleaved stages are the harder case.
@pytest.mark.parametrize("layout", [pytest.param("pp2", marks=pytest.mark.nightly), "pp2-vpp2"])
def test_stages_continue_after_an_exception_outside_of_their_passes(
    engine_in_layout, oracle, layout
):
    # In a pass an exception breaks the group, because messages between stages are under way.
    for after_failure, expected in engine_in_layout(layout).run(
        norms_with_and_without_a_failed_hook,
        setup=oracle.make_setup(QWEN2_GROUPED),
        batch=oracle.get_batch(),
    ):
        assert after_failure == expected


def norms_with_and_without_a_failed_hook(rank, *, setup, batch):
    """Return the gradient norms of an update after a call with a failing hook, and without one."""
    engine = rank.cached_engine(setup)
    local_batch = rank_slice(engine, batch, split=TWO)

    def fail(batch, ctx):
        raise InjectedError("bad sample")

    def update():
        engine.set_loss_fn(ClippedPpoProbe())
        return run_update(engine, [local_batch]).grad_norm

    expected = update()
    engine.optimizer_zero_grad()
    with pytest.raises(InjectedError), engine.train_mode():
        engine.forward_backward_step(batch, preprocess_fn=fail)
    return update(), expected


@pytest.mark.parametrize("model", [QWEN2_UNTIED, QWEN2_TIED], ids=lambda model: model.name)
def test_split_weights_are_loaded_unchanged(engine_in_layout, oracle, model):
    # The bridge scatters strided slices of column-split matrices, and gloo ignores strides.
    setup = oracle.make_setup(model)
    exported = engine_in_layout("tp2").run(exported_weights, setup=setup)[0]
    assert_all_equal(
        exported, load_file(f"{setup.model_path}/model.safetensors"), quantity="weights"
    )
    batch = oracle.get_batch(model=model)
    outputs = engine_in_layout("tp2").run(
        measure_outputs, setup=setup, batch=batch, requested_outputs=[HeadOutput.LOGPROB]
    )[0]
    assert_close(
        outputs.columns[HeadOutput.LOGPROB],
        oracle.get_outputs(setup, batch, HeadOutput.LOGPROB),
        LOGPROB,
        quantity="log-probs",
    )


def exported_weights(rank, *, setup):
    """Return the full tensors by name."""
    return collect_weights(rank.cached_engine(setup))


def test_gradient_norm_counts_every_split_matrix_once(engine_in_layout, oracle):
    # Megatron marks shards only where it initializes them; the norm ignores unmarked ones on
    # all ranks but the first.
    setup, batch = oracle.make_setup(QWEN2_GROUPED), oracle.get_batch()
    expected = oracle.get_update(setup, ClippedPpoProbe(), batch).grad_norm
    for update in engine_in_layout("tp2").run(
        measure_update, setup=setup, objective=ClippedPpoProbe(), batch=batch
    ):
        assert_close(update.grad_norm, expected, LOSS, quantity="gradient norm")


def test_gradients_have_float32_precision(engine_in_layout, oracle):
    # Megatron's fused cross-entropy keeps its gradient in bf16, off by 1e-3; this head does not.
    setup, batch = oracle.make_setup(QWEN2_UNTIED), oracle.get_batch(model=QWEN2_UNTIED)
    expected = oracle.get_update(setup, ClippedPpoProbe(), batch)
    update = engine_in_layout("1-rank").run(
        measure_update, setup=setup, objective=ClippedPpoProbe(), batch=batch
    )[0]
    assert_all_close(update.gradients, expected.gradients, GRADIENT, quantity="gradient")


@pytest.mark.parametrize(
    "layout",
    [
        name
        for name, layout in LAYOUTS.items()
        if layout.world_size == 2 and "pipeline_parallel" in layout.fields
    ],
)
def test_every_chunk_of_every_rank_has_a_decoder_layer(engine_in_layout, oracle, layout):
    # A stage without layers would pass every test and show nothing of pipelines.
    for counts in engine_in_layout(layout).run(
        count_layers, setup=oracle.make_setup(QWEN2_GROUPED)
    ):
        assert len(counts) == LAYOUTS[layout].fields.get("virtual_pipeline", 1)
        assert all(count > 0 for count in counts)


def count_layers(rank, *, setup):
    """Return the number of decoder layers in each of this rank's chunks."""
    return [
        len(chunk.decoder.layers)
        for chunk in rank.cached_engine(setup)._components.runner._chunks.unwrapped
    ]


@pytest.mark.parametrize(
    # Nightly: interleaved stages are the harder case.
    "layout",
    ["pp2-vpp2", pytest.param("pp2", marks=pytest.mark.nightly)],
)
def test_pipelines_equal_one_rank_for_ten_updates(engine_in_layout, oracle, layout):
    # Megatron frees outputs that gloo is still sending. The first updates may then be right by
    # chance, but hardly all ten.
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW)
    batches = [oracle.get_batch(seed=seed % 3) for seed in range(10)]
    split = Split(name="four", min_micro_batches=4)
    one_rank, pipeline = (
        engine_in_layout(name).run(
            measure_updates, setup=setup, objective=ClippedPpoProbe(), batches=batches, split=split
        )[0]
        for name in ("1-rank", layout)
    )
    for number, (update, expected) in enumerate(zip(pipeline, one_rank, strict=True), start=1):
        assert_close(
            update.grad_norm,
            expected.grad_norm,
            UPDATE,
            quantity=f"gradient norm of update {number}",
        )


PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# The frequencies have periods of 6, 63, 628 and 6283 tokens. The first is kept, the second is
# between 64 / 4 and 64 and therefore interpolated, and the others become 8 times as long.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


# Megatron-Bridge 0.3 does not read the base where transformers 5 has it, and Megatron takes 8192 as
# the original length of every Llama 3.
@pytest.mark.parametrize(
    "rope",
    [{"rope_type": "default", "rope_theta": 1e6}, LLAMA3],
    ids=lambda rope: rope["rope_type"],
)
def test_rotary_frequencies_follow_the_model_config(engine_in_layout, oracle, tmp_path, rope):
    scaled = save_model(rope, tmp_path / "scaled")
    plain = save_model(PLAIN_ROPE, tmp_path / "plain")
    batch = oracle.get_batch()
    outputs = engine_in_layout("1-rank").run(
        measure_outputs, setup=scaled, batch=batch, requested_outputs=[HeadOutput.LOGPROB]
    )[0]
    expected = oracle.get_outputs(scaled, batch, HeadOutput.LOGPROB)
    assert_close(outputs.columns[HeadOutput.LOGPROB], expected, LOGPROB, quantity="log-probs")
    # The test can fail: with plain frequencies the same weights give other log-probs.
    assert (expected - oracle.get_outputs(plain, batch, HeadOutput.LOGPROB)).abs().max() > 1e-3


def save_model(rope, folder):
    """Save a model with these rope parameters; its weights are always the same."""
    fields = {**QWEN2_GROUPED.settings, **QWEN2_GROUPED.architecture, "rope_parameters": rope}
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(fields.pop("model_type"), **fields), dtype=torch.float32
    )
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.3)
    network.save_pretrained(folder)
    return EngineSetup(model_path=str(folder))


def test_updates_after_loading_count_once_per_parameter(engine_in_layout, oracle):
    # AdamW increments a shared step tensor once per parameter: wrong from the second update on.
    setup = oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW)
    batches = [oracle.get_batch(seed=seed) for seed in range(4)]
    for loaded, continued in engine_in_layout("dp2-distopt").run(
        run_four_updates_with_a_reload, setup=setup, batches=batches
    ):
        assert_all_equal(loaded, continued, quantity="weights after four updates")


def run_four_updates_with_a_reload(rank, *, setup, batches):
    """Return the master weights of an engine that loaded the state of another, and of that one."""
    saved, loaded = rank.temporary_engine(setup), rank.temporary_engine(setup)
    for engine in (saved, loaded):
        engine.set_loss_fn(ClippedPpoProbe())
    run_update(saved, [rank_slice(saved, batches[0], split=ONE_MICRO_BATCH)])
    loaded.load_state(iter(list(saved.export_state())))
    masters = []
    for engine in (loaded, saved):
        for batch in batches[1:]:
            run_update(engine, [rank_slice(engine, batch, split=ONE_MICRO_BATCH)])
        masters.append({name: entry.master for name, entry in collect_state(engine).items()})
    return masters


@pytest.mark.parametrize(
    # Nightly: the kit's test of two calls runs on several replicas and stages in each pull request.
    "layout",
    [
        pytest.param("2-ranks", marks=pytest.mark.nightly),
        "dp2-distopt",
        pytest.param("pp2", marks=pytest.mark.nightly),
    ],
)
def test_gradients_of_several_calls_are_reduced_once(engine_in_layout, oracle, layout):
    # Megatron's schedules finalize gradients after every call, which gave norms of 4.04 and 3.35
    # instead of 2.69.
    setup, batch = oracle.make_setup(QWEN2_TIED), oracle.get_batch(model=QWEN2_TIED)
    expected = oracle.get_update(setup, ClippedPpoProbe(), batch)
    for mark_final in (True, False):
        updates = engine_in_layout(layout).run(
            run_update_in_three_calls, setup=setup, batch=batch, mark_final=mark_final
        )
        assert_all_close(updates[0].gradients, expected.gradients, GRADIENT, quantity="gradient")
        assert all(abs(update.grad_norm / expected.grad_norm - 1) < 1e-5 for update in updates)


def run_update_in_three_calls(rank, *, setup, batch, mark_final):
    """Run an update in three calls, all with the denominators of the full mini-batch."""
    engine = rank.cached_engine(setup)
    engine.set_loss_fn(ClippedPpoProbe())
    denominators = rank_slice(engine, batch, split=ONE_MICRO_BATCH).denominators
    ranges = (range(2), range(2, 4), range(4, batch.num_sequences))
    thirds = [batch.select(indices) for indices in ranges]
    local_batches = [
        replace(rank_slice(engine, third, split=TWO), denominators=denominators) for third in thirds
    ]
    return run_update(engine, local_batches, mark_final=mark_final)
