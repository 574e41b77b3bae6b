"""Test mixtures of experts against transformers for any division, and exact exports."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from temper_engine_api.conformance.harness.engine_under_test import EngineUnderTest
from temper_engine_api.conformance.harness.measurements import (
    FIVE_MICRO_BATCHES,
    ONE_MICRO_BATCH,
    Split,
    collect_weights,
    measure_outputs,
    measure_update,
    measure_updates,
    merge_update_metrics,
    rank_slice,
)
from temper_engine_api.conformance.harness.rank import ADAMW
from temper_engine_api.conformance.harness.tolerances import (
    BF16,
    GRADIENT,
    LOGPROB,
    LOSS,
    UPDATE,
    assert_all_close,
    assert_all_equal,
    assert_close,
    get_family_gradient,
)
from temper_engine_api.conformance.inputs.model_families import FAMILIES
from temper_engine_api.conformance.inputs.probes import ClippedPpoProbe, ZeroProbe
from temper_engine_api.conformance.inputs.tiny_models import QWEN2_GROUPED, TinyModel
from temper_engine_api.conformance.oracle.oracle_comparison import check_replayed_mismatch
from temper_engine_api.errors import BatchError, CapabilityError, ConfigError
from temper_engine_api.layout import Layout
from temper_engine_api.objective import ROUTED_EXPERTS, HeadOutput
from temper_engine_api.specs import ModelSpec
from temper_engine_megatron.engine import MegatronEngine
from temper_engine_megatron.layouts import LAYOUTS as ENGINE_LAYOUTS

EXPERTS = TinyModel(
    name="qwen3-moe",
    architecture={
        "model_type": "qwen3_moe",
        "num_key_value_heads": 2,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
)
EXPERTS_WITHOUT_NORMALIZATION = replace(
    EXPERTS,
    name="qwen3-moe-unnormalized",
    architecture={**EXPERTS.architecture, "norm_topk_prob": False},
)
LAYOUTS = {
    layout.name: layout
    for layout in (
        *ENGINE_LAYOUTS,
        Layout(name="one-rank", world_size=1),
        Layout(
            name="ep2", world_size=2, fields={"expert_parallel": 2, "distributed_optimizer": True}
        ),
        Layout(name="cp2-ep2", world_size=2, fields={"context_parallel": 2, "expert_parallel": 2}),
        Layout(
            name="pp2-ep2",
            world_size=4,
            fields={"pipeline_parallel": 2, "expert_parallel": 2, "distributed_optimizer": True},
        ),
        Layout(
            name="tp2-sp-ep2-etp2",
            world_size=4,
            fields={"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2},
        ),
        Layout(name="ep4", world_size=4, fields={"expert_parallel": 4}),
        Layout(
            name="dp2-ep2",
            world_size=4,
            fields={"expert_parallel": 2, "distributed_optimizer": True},
        ),
    )
}
FOUR = Split(name="four", min_micro_batches=4)


def select_layouts(names, *, nightly):
    """Return the layouts of a test; the second ones run in the nightly run only."""
    # Nightly: each layout builds an engine on several ranks. The layouts of every day divide
    # experts, matrices or layers; the others combine these or divide less.
    return [*names, *(pytest.param(name, marks=pytest.mark.nightly) for name in nightly)]


@pytest.fixture
def engine_in_layout(rank_pool, request):
    def make(name):
        layout = LAYOUTS[name]
        ranks = rank_pool if layout.world_size <= 2 else request.getfixturevalue("four_rank_pool")
        return EngineUnderTest(
            engine="megatron",
            capabilities=MegatronEngine.capabilities,
            layout=layout,
            all_layouts=(layout,),
            rank_pool=ranks,
        )

    return make


def split_joined_experts(tensors):
    """Return experts under their names in files; transformers joins a layer's, gate above up."""
    split = {}
    for name, tensor in tensors.items():
        is_joined = tensor.ndim == 3
        for number in range(8 if is_joined else 0):
            stem = f"{name.partition('.experts.')[0]}.experts.{number}"
            if name.endswith("down_proj"):
                split[f"{stem}.down_proj.weight"] = tensor[number]
            else:
                split[f"{stem}.gate_proj.weight"] = tensor[number, :24]
                split[f"{stem}.up_proj.weight"] = tensor[number, 24:]
        if not is_joined:
            split[name] = tensor
    return split


SMALL = ("tp2-sp-ep2", "pp2")
# Nightly: the conformance kit compares the gradients of families with experts in ep2 every
# day; the others are larger, or parts of the first two.
LARGE = (
    "ep2",
    "one-rank",
    "cp2-ep2",
    "pp2-vpp2",
    "pp2-ep2",
    "tp2-sp-pp2-ep2",
    "tp2-sp-ep2-etp2",
    "ep4",
    "dp2-ep2",
)


@pytest.mark.parametrize("layout", select_layouts(SMALL, nightly=LARGE))
def test_gradients_equal_transformers(engine_in_layout, oracle, layout):
    setup, batch = oracle.make_setup(EXPERTS), oracle.get_batch(model=EXPERTS)
    expected = oracle.get_update(setup, ClippedPpoProbe(), batch)
    updates = engine_in_layout(layout).run(
        measure_update, setup=setup, objective=ClippedPpoProbe(), batch=batch, split=FOUR
    )
    assert_all_close(
        updates[0].gradients,
        split_joined_experts(expected.gradients),
        GRADIENT,
        quantity="gradient",
    )
    for update in updates:
        assert_close(update.grad_norm, expected.grad_norm, LOSS, quantity="gradient norm")


# Nightly: the same gradients are compared in float32 every day.
@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["one-rank", "ep2", "pp2", "pp2-ep2"])
def test_gradient_norm_in_bf16_equals_transformers_within_bf16(engine_in_layout, oracle, layout):
    batch = oracle.get_batch(model=EXPERTS)
    expected = oracle.get_update(oracle.make_setup(EXPERTS), ClippedPpoProbe(), batch)
    setup = oracle.make_setup(EXPERTS, compute="bf16")
    for update in engine_in_layout(layout).run(
        measure_update, setup=setup, objective=ClippedPpoProbe(), batch=batch, split=FOUR
    ):
        assert_close(update.grad_norm, expected.grad_norm, BF16, quantity="gradient norm")


@pytest.mark.parametrize(
    "model",
    # Nightly: the gradients of this model are compared every day.
    [pytest.param(EXPERTS, marks=pytest.mark.nightly), EXPERTS_WITHOUT_NORMALIZATION],
    ids=lambda model: model.name,
)
def test_logprobs_equal_transformers(engine_in_layout, oracle, model):
    setup, batch = oracle.make_setup(model), oracle.get_batch(model=EXPERTS)
    outputs = engine_in_layout("ep2").run(
        measure_outputs, setup=setup, batch=batch, requested_outputs=[HeadOutput.LOGPROB]
    )[0]
    assert_close(
        outputs.columns[HeadOutput.LOGPROB],
        oracle.get_outputs(setup, batch, HeadOutput.LOGPROB),
        LOGPROB,
        quantity="log-probs",
    )


@pytest.mark.parametrize(
    "layout", select_layouts(["ep2"], nightly=["tp2-sp-ep2", "tp2-sp", "pp2-ep2"])
)
def test_exported_weights_equal_the_files_bit_for_bit(engine_in_layout, oracle, layout):
    setup = oracle.make_setup(EXPERTS)
    exported = engine_in_layout(layout).run(exported_weights, setup=setup)
    assert_all_equal(
        exported[0], load_file(f"{setup.model_path}/model.safetensors"), quantity="weights"
    )
    assert list(exported[0]) == list(exported[1])


def exported_weights(rank, *, setup):
    """Return the full tensors by name."""
    return collect_weights(rank.cached_engine(setup))


def test_updates_with_divided_experts_equal_one_rank(engine_in_layout, oracle):
    # Gradients are clipped by one norm over all experts, and each rank has moments of its shards.
    setup = oracle.make_setup(EXPERTS, optimizer=ADAMW)
    batches = [oracle.get_batch(seed=seed, model=EXPERTS) for seed in range(2)]
    one_rank, divided = (
        engine_in_layout(name).run(
            measure_updates, setup=setup, objective=ClippedPpoProbe(), batches=batches
        )[0]
        for name in ("one-rank", "ep2")
    )
    for update, expected in zip(divided, one_rank, strict=True):
        assert_all_close(update.masters, expected.masters, UPDATE, quantity="master weights")
        assert {entry.update_count for entry in update.state.values()} == {
            entry.update_count for entry in expected.state.values()
        }


def test_infinite_expert_gradient_of_one_rank_makes_all_ranks_skip(engine_in_layout, oracle):
    # Megatron has a separate optimizer for experts; the norm must include both.
    setup, batch = (
        oracle.make_setup(EXPERTS, optimizer=ADAMW),
        oracle.get_batch(model=EXPERTS),
    )
    for is_finite, is_changed, num_steps in engine_in_layout("ep2").run(
        update_with_infinite_gradient, setup=setup, batch=batch
    ):
        assert (is_finite, is_changed, num_steps) == (False, False, 0)


def update_with_infinite_gradient(rank, *, setup, batch):
    """Return whether the norm is finite, whether a weight changed, and the schedule's steps."""
    engine = rank.temporary_engine(setup)
    engine.set_loss_fn(ClippedPpoProbe())
    before = collect_weights(engine)
    with engine.train_mode():
        engine.forward_backward_batch(rank_slice(engine, batch, split=FOUR), forward_only=False)
    if dist.get_rank() == 1:
        chunk = engine._components.runner._chunks.unwrapped[0]
        vars(chunk.decoder.layers[0].mlp.experts.local_experts[0].linear_fc1.weight)["main_grad"][
            0, 0
        ] = torch.inf
    norm = engine.optimizer_step()
    after = collect_weights(engine)
    return (
        math.isfinite(norm),
        any(not torch.equal(after[name], before[name]) for name in before),
        engine.num_schedule_steps,
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"recompute": "layers"}, marks=pytest.mark.nightly),
        # Nightly: gradients with prescribed experts contain a router loss, also with padding.
        pytest.param({"remove_padding": False}, marks=pytest.mark.nightly),
    ],
    ids=lambda changes: next(iter(changes), "default"),
)
@pytest.mark.parametrize(
    "layout", select_layouts(["tp2-sp-ep2"], nightly=["one-rank", "cp2-ep2", "pp2", "pp2-vpp2"])
)
def test_router_losses_and_loads_match_transformers(engine_in_layout, oracle, layout, changes):
    check_router_losses(
        engine_in_layout(layout), oracle, model=EXPERTS, changes=changes, tolerance=GRADIENT
    )


SIGMOID_FAMILIES = ("deepseek_v3", "glm4_moe", "nemotron_h")
ROWS = {"remove_padding": False}


@pytest.mark.parametrize(
    ("family", "layout", "changes"),
    [
        ("deepseek_v3", "ep2", {}),
        ("glm4_moe", "tp2-sp-ep2", ROWS),
        # Nightly: each combination builds an engine. Two run every day.
        *(
            pytest.param(family, layout, changes, marks=pytest.mark.nightly)
            for family in SIGMOID_FAMILIES
            for layout in ("one-rank", "ep2", "tp2-sp-ep2", "pp2")
            for changes in ({}, ROWS)
        ),
    ],
)
def test_router_losses_and_loads_of_sigmoid_routers_match_transformers(
    engine_in_layout, oracle, family, layout, changes
):
    check_router_losses(
        engine_in_layout(layout),
        oracle,
        model=FAMILIES[family],
        changes=changes,
        tolerance=get_family_gradient(family),
    )


def check_router_losses(engine, oracle, *, model, changes, tolerance):
    """Compare gradients of both router losses, and all router metrics, with transformers."""
    losses = (("router_aux_loss", 0.1), ("router_z_loss", 0.1))
    batch = oracle.get_batch(model=model)
    expected = oracle.get_update(oracle.make_setup(model, engine_fields=losses), ZeroProbe(), batch)
    setup = oracle.make_setup(model, engine_fields=(*losses, *changes.items()))
    for split in (ONE_MICRO_BATCH, FIVE_MICRO_BATCHES):
        updates = engine.run(
            measure_update, setup=setup, objective=ZeroProbe(), batch=batch, split=split
        )
        assert_all_close(updates[0].gradients, expected.gradients, tolerance, quantity="gradient")
        metrics = merge_update_metrics(updates)
        for name, value in merge_update_metrics([expected]).items():
            if name.startswith("router/"):
                assert_close(metrics[name], value, LOSS, quantity=name)


def prescribe_experts(batch, *, num_layers=4, num_experts=8, num_chosen=3):
    generator = torch.Generator().manual_seed(5)
    noise = torch.rand(batch.num_tokens, num_layers, num_experts, generator=generator)
    experts = noise.topk(num_chosen).indices.to(torch.int16)
    # The router chooses for the last tokens, which a sampler never processes.
    experts[batch.sequence_starts[1:].long() - 1] = -1
    return batch.with_columns({ROUTED_EXPERTS: experts})


@pytest.mark.parametrize(
    "changes", [{}, {"remove_padding": False, "recompute": "layers"}], ids=["default", "rows"]
)
@pytest.mark.parametrize(
    "layout", select_layouts(["tp2-sp-ep2"], nightly=["cp2", "cp2-ep2", "pp2", "pp2-vpp2"])
)
def test_gradient_with_prescribed_experts_matches_transformers(
    engine_in_layout, oracle, layout, changes
):
    fields = (("router_aux_loss", 0.1),)
    batch = prescribe_experts(oracle.get_batch(model=EXPERTS))
    expected = oracle.get_update(
        oracle.make_setup(EXPERTS, engine_fields=fields), ClippedPpoProbe(), batch
    )
    updates = engine_in_layout(layout).run(
        measure_update,
        setup=oracle.make_setup(EXPERTS, engine_fields=(*fields, *changes.items())),
        objective=ClippedPpoProbe(),
        batch=batch,
        split=FIVE_MICRO_BATCHES,
    )
    assert_all_close(updates[0].gradients, expected.gradients, GRADIENT, quantity="gradient")


# Nightly: the test above prescribes experts every day, and the kit compares the routers of these
# families.
@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["one-rank", "tp2-sp-ep2", "pp2"])
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_gradient_with_prescribed_experts_of_grouped_sigmoid_routers_matches_transformers(
    engine_in_layout, oracle, family, layout
):
    model = FAMILIES[family]
    # The first of the four layers is dense. Experts are drawn across the groups.
    batch = prescribe_experts(
        oracle.get_batch(model=model), num_layers=3, num_experts=4, num_chosen=2
    )
    setup = oracle.make_setup(model)
    expected = oracle.get_update(setup, ClippedPpoProbe(), batch)
    updates = engine_in_layout(layout).run(
        measure_update,
        setup=setup,
        objective=ClippedPpoProbe(),
        batch=batch,
        split=FIVE_MICRO_BATCHES,
    )
    assert_all_close(
        updates[0].gradients, expected.gradients, get_family_gradient(family), quantity="gradient"
    )


@pytest.mark.parametrize("changes", [{}, {"remove_padding": False}], ids=["default", "rows"])
@pytest.mark.parametrize(
    "layout", select_layouts(["tp2-sp-ep2"], nightly=["cp2", "cp2-ep2", "pp2", "pp2-vpp2"])
)
def test_returned_experts_are_those_of_transformers(engine_in_layout, oracle, layout, changes):
    batch = oracle.get_batch(model=EXPERTS)
    expected = oracle.get_outputs(oracle.make_setup(EXPERTS), batch, HeadOutput.ROUTED_EXPERTS)
    outputs = engine_in_layout(layout).run(
        measure_outputs,
        setup=oracle.make_setup(EXPERTS, engine_fields=tuple(changes.items())),
        batch=batch,
        requested_outputs=[HeadOutput.LOGPROB, HeadOutput.ROUTED_EXPERTS],
        split=FIVE_MICRO_BATCHES,
    )[0]
    # In any order.
    actual = outputs.columns[HeadOutput.ROUTED_EXPERTS]
    assert actual.sort().values.equal(expected.sort().values)


@pytest.mark.parametrize(
    "layout",
    select_layouts(["pp2"], nightly=["cp2", "one-rank", "pp2-vpp2", "tp2-sp", "cp2-ep2"]),
)
def test_replay_leaves_the_mismatch_of_a_dense_model(engine_in_layout, oracle, layout):
    # The kit runs this test in its default layouts and in those with experts. Others are nightly,
    # because the exact comparisons above would fail, too.
    check_replayed_mismatch(engine_in_layout(layout), oracle)


@pytest.mark.parametrize(
    ("has_experts", "sizes", "message"),
    [
        (True, (3, 3), r"has shape \(\d+, 3, 3\), but must be \[tokens, layers, experts per"),
        (True, (2, 2), "has 2 experts for each token and layer, but the model chooses 3"),
        (False, (2, 3), "the model has no experts: remove it"),
    ],
)
def test_prescribed_experts_that_do_not_fit_are_refused(
    config, start, batch, has_experts, sizes, message
):
    engine = start(model=(with_experts(config) if has_experts else config).model)
    num_layers, num_chosen = sizes
    prescribed = prescribe_experts(batch, num_layers=num_layers, num_chosen=num_chosen)
    packed = engine.shard_data(prescribed, max_tokens=64)
    with engine.eval_mode(), pytest.raises(BatchError, match=message):
        engine.forward_backward_batch(packed, forward_only=True, outputs=[HeadOutput.LOGPROB])


def with_experts(config, **changes):
    architecture = {
        **config.model.architecture,
        **EXPERTS.architecture,
        "head_dim": 8,
        **changes,
    }
    return replace(config, model=ModelSpec(architecture=architecture))


def test_new_mixture_of_experts_has_the_names_of_files(config, start):
    engine = start(model=with_experts(config).model)
    with engine.export_weights() as stream:
        names = {name for name, _ in stream}
    assert {f"model.layers.1.mlp.experts.{i}.up_proj.weight" for i in range(8)} < names


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"decoder_sparse_step": 2}, CapabilityError, "only some layers have experts"),
        ({"mlp_only_layers": [0]}, CapabilityError, "only some layers have experts"),
        ({"num_experts_per_tok": 1}, CapabilityError, "chooses one expert per token"),
        ({"num_experts": 0}, CapabilityError, "qwen3_moe model has num_experts 0"),
    ],
)
def test_model_whose_experts_megatron_computes_otherwise_is_refused(config, changes, error, match):
    with pytest.raises(error, match=match):
        MegatronEngine(with_experts(config, **changes)).init_model()


def test_expert_parallel_of_a_dense_model_is_refused(engine_in_layout, oracle):
    for message in engine_in_layout("ep2").run(
        build_and_return_error, setup=oracle.make_setup(QWEN2_GROUPED)
    ):
        assert "expert_parallel is 2, but the model has no experts to divide" in message


def build_and_return_error(rank, *, setup):
    """Return the error of init_model."""
    with pytest.raises(ConfigError) as caught:
        rank.construct_engine(setup).init_model()
    return str(caught.value)


@pytest.mark.parametrize("name", ["router_aux_loss", "router_z_loss"])
def test_router_loss_of_a_dense_model_is_refused(config, name):
    with pytest.raises(ConfigError, match=f"{name} is 0.1, but the model has no experts"):
        MegatronEngine(replace(config, **{name: 0.1})).init_model()
    with pytest.raises(ConfigError, match=f"{name} is -1, but must be at least 0"):
        replace(config, **{name: -1})


@pytest.mark.parametrize(
    ("model", "changes", "error", "message"),
    [
        (
            {},
            {"expert_products": "grouped"},
            ConfigError,
            "expert_products is 'grouped', but the model has no experts",
        ),
        ({}, {"router_z_loss": 0.1}, ConfigError, "router_z_loss is 0.1, but the model has no"),
        (
            EXPERTS.architecture,
            {"expert_products": "grouped", "device": "cpu"},
            CapabilityError,
            "needs bf16 on CUDA, but the device is cpu",
        ),
        ({**EXPERTS.architecture, "mlp_only_layers": [0]}, {}, CapabilityError, "only some layers"),
        ({"model_type": "gemma2"}, {}, CapabilityError, "for which it lacks soft-capped attention"),
        ({}, {"tensor_parallel": 3}, ConfigError, "tensor_parallel is 3, which must divide"),
    ],
)
def test_check_before_a_run_finds_what_a_build_refuses(config, model, changes, error, message):
    architecture = {**config.model.architecture, **model}
    wrong = replace(config, model=ModelSpec(architecture=architecture), **changes)
    with pytest.raises(error, match=message):
        MegatronEngine.check_model(wrong)


def test_check_before_a_run_does_not_ask_for_the_gpus_of_another_host(config):
    grouped = with_experts(replace(config, expert_products="grouped", device="auto"))
    MegatronEngine.check_model(
        replace(grouped, precision=replace(config.precision, compute="bf16"))
    )


def test_other_expert_tensor_parallel_needs_expert_parallel(config):
    with pytest.raises(ConfigError, match="Raise expert_parallel"):
        replace(config, tensor_parallel=2, expert_tensor_parallel=1)
