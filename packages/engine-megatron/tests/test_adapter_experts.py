"""Test adapters of experts: any division, resharding, and refusals."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from temper_engine_api.conformance.harness.measurements import (
    ONE_MICRO_BATCH,
    SPLITS,
    collect_state,
    collect_weights,
    load_and_train,
    measure_update,
    rank_slice,
    train,
    train_and_save,
)
from temper_engine_api.conformance.harness.rank import ADAMW
from temper_engine_api.conformance.harness.tolerances import (
    GRADIENT,
    LOSS,
    UPDATE,
    assert_all_close,
    assert_close,
    assert_same_state,
    get_family_gradient,
    get_family_logprob,
)
from temper_engine_api.conformance.inputs.model_families import FAMILIES
from temper_engine_api.conformance.inputs.probes import ClippedPpoProbe
from temper_engine_api.conformance.inputs.tiny_adapters import TinyAdapter, save_adapter
from temper_engine_api.conformance.inputs.tiny_models import QWEN2_TIED
from temper_engine_api.errors import CapabilityError, ConfigError
from temper_engine_api.layout import Layout, default_layout
from temper_engine_api.objective import HeadOutput
from temper_engine_api.specs import LoraSpec, ModelSpec
from temper_engine_megatron.adapter.expert_adapters import join_expert_shards, take_expert_shard
from temper_engine_megatron.components import check_model
from temper_engine_megatron.engine import MegatronEngine

BOTH = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
EXPERTS_AND_ATTENTION = TinyAdapter(
    name="divided",
    model=QWEN2_TIED,
    fields={"target_modules": ["q_proj", "o_proj"], "target_parameters": list(BOTH)},
)
ONLY_EXPERTS = TinyAdapter(
    name="experts-only",
    model=QWEN2_TIED,
    fields={"target_modules": [], "target_parameters": list(BOTH)},
)
LAYOUTS = {
    layout.name: layout
    for layout in (
        default_layout(1),
        Layout(
            name="ep2", world_size=2, fields={"expert_parallel": 2, "distributed_optimizer": True}
        ),
        Layout(
            name="tp2-sp-ep2",
            world_size=2,
            fields={
                "tensor_parallel": 2,
                "sequence_parallel": True,
                "expert_parallel": 2,
                "expert_tensor_parallel": 1,
            },
        ),
        Layout(
            name="tp2-sp", world_size=2, fields={"tensor_parallel": 2, "sequence_parallel": True}
        ),
        Layout(name="cp2-ep2", world_size=2, fields={"context_parallel": 2, "expert_parallel": 2}),
        Layout(
            name="pp2-recompute",
            world_size=2,
            fields={"pipeline_parallel": 2, "recompute": "layers"},
        ),
        Layout(
            name="tp2-sp-ep2-etp2",
            world_size=4,
            fields={"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2},
        ),
        Layout(
            name="pp2-ep2",
            world_size=4,
            fields={"pipeline_parallel": 2, "expert_parallel": 2, "distributed_optimizer": True},
        ),
        Layout(
            name="dp2-ep2",
            world_size=4,
            fields={"expert_parallel": 2, "distributed_optimizer": True},
        ),
    )
}
ARCHITECTURE = {
    "model_type": "qwen3_moe",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "tie_word_embeddings": True,
}
LORA = LoraSpec(rank=3, alpha=6.0, target_modules=("q_proj",), target_parameters=BOTH)


def mark_nightly(*names):
    """Mark these layouts for the nightly run."""
    # Nightly: each layout builds its engines. Those of every day divide experts and matrices, too.
    return [pytest.param(name, marks=pytest.mark.nightly) for name in names]


@pytest.fixture
def run_in(rank_pool, request):
    """Run a job in a layout, or on one rank of the other engine."""

    def run(name, job, *, engine="megatron", **arguments):
        layout = LAYOUTS[name]
        ranks = rank_pool if layout.world_size <= 2 else request.getfixturevalue("four_rank_pool")
        return ranks.run(job, engine=engine, layout=layout, arguments=arguments)

    return run


def run_update(run_in, layout, *, setup, batch):
    """Run the first update of an adapter on every rank of a layout."""
    return run_in(
        layout,
        measure_update,
        setup=setup,
        objective=ClippedPpoProbe(),
        batch=batch,
        split=SPLITS[1],
    )


@pytest.fixture
def moe_oracle(oracle):
    return oracle.with_experts()


@pytest.mark.parametrize(
    "layout",
    [
        "tp2-sp-ep2",
        "pp2-recompute",
        *mark_nightly("tp2-sp", "ep2", "cp2-ep2", "tp2-sp-ep2-etp2", "pp2-ep2", "dp2-ep2"),
    ],
)
def test_gradients_equal_peft_in_every_division_of_experts(run_in, moe_oracle, layout):
    setup, batch = (
        moe_oracle.make_adapter_setup(EXPERTS_AND_ATTENTION),
        moe_oracle.get_batch(model=QWEN2_TIED),
    )
    expected = moe_oracle.get_update(setup, ClippedPpoProbe(), batch)
    updates = run_update(run_in, layout, setup=setup, batch=batch)
    assert_all_close(updates[0].gradients, expected.gradients, GRADIENT, quantity="gradient")
    for update in updates:
        assert_close(update.grad_norm, expected.grad_norm, LOSS, quantity="gradient norm")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("ep2", "tp2-sp"),
        *(
            # Nightly: the first pair changes which rank has an expert and how its matrices are
            # divided.
            pytest.param(*pair, marks=pytest.mark.nightly)
            for pair in [("tp2-sp", "ep2"), ("1-rank", "pp2-ep2"), ("dp2-ep2", "1-rank")]
        ),
    ],
)
def test_checkpoint_continues_in_another_division_of_experts(
    run_in, moe_oracle, tmp_path, before, after
):
    setup = moe_oracle.make_adapter_setup(EXPERTS_AND_ATTENTION, optimizer=ADAMW)
    batches = [moe_oracle.get_batch(seed=seed, model=QWEN2_TIED) for seed in range(3)]
    uninterrupted = run_in(before, train_all, setup=setup, batches=batches)[0]
    run_in(before, train_and_save, setup=setup, batches=batches[:2], folder=tmp_path, step=2)
    assert_same_state(
        run_in(after, load_and_collect_state, setup=setup, folder=tmp_path)[0],
        uninterrupted[1].state,
    )
    resumed = run_in(after, load_and_train, setup=setup, batches=batches[2:], folder=tmp_path)[0]
    assert_all_close(
        resumed[-1].masters,
        uninterrupted[2].masters,
        UPDATE,
        quantity="adapter after the next update",
    )


def train_all(rank, *, setup, batches):
    """Train on all batches without an interruption."""
    return train(rank.temporary_engine(setup), batches)


def load_and_collect_state(rank, *, setup, folder):
    """Load a checkpoint and return the state."""
    engine = rank.temporary_engine(setup)
    engine.load_checkpoint(str(folder))
    return collect_state(engine)


@pytest.mark.parametrize("layout", ["ep2", *mark_nightly("tp2-sp", "1-rank", "pp2-ep2")])
def test_adapter_of_only_experts_trains(run_in, moe_oracle, layout):
    setup = moe_oracle.make_adapter_setup(ONLY_EXPERTS, optimizer=ADAMW)
    batches = [moe_oracle.get_batch(seed=seed, model=QWEN2_TIED) for seed in range(2)]
    expected = moe_oracle.run(train_all, setup=setup, batches=batches)
    updates = run_in(layout, train_all, setup=setup, batches=batches)[0]
    for update, expected_update in zip(updates, expected, strict=True):
        assert_all_close(update.masters, expected_update.masters, UPDATE, quantity="adapter")


def test_other_engine_loads_the_adapter_with_equal_logprobs(run_in, moe_oracle, tmp_path):
    pytest.importorskip(
        "temper_engine_fsdp",
        reason="the other engine is not installed: pip install ./packages/engine-fsdp",
    )
    setup = moe_oracle.make_adapter_setup(EXPERTS_AND_ATTENTION, optimizer=ADAMW)
    batch = moe_oracle.get_batch(model=QWEN2_TIED)
    content, logprobs = run_in("ep2", update_and_export_adapter, setup=setup, batch=batch)[0]
    saved = replace(
        setup, lora=LoraSpec(path=str(save_adapter(*content, folder=tmp_path / "adapter")))
    )
    loaded = run_in(
        "1-rank", compute_logprobs_in_new_engine, engine="fsdp", setup=saved, batch=batch
    )[0]
    assert_close(loaded, logprobs, LOSS, quantity="log-probs")


def update_and_export_adapter(rank, *, setup, batch):
    """Return the contents of PEFT's two files, and log-probs of the engine."""
    engine = rank.temporary_engine(setup)
    train(engine, [batch])
    return engine.export_adapter(), compute_logprobs(engine, batch)


def compute_logprobs_in_new_engine(rank, *, setup, batch):
    """Return log-probs of a new engine."""
    return compute_logprobs(rank.temporary_engine(setup), batch)


def compute_logprobs(engine, batch):
    """Return [T] log-probs in the order of the batch."""
    with engine.eval_mode():
        result = engine.forward_backward_batch(
            rank_slice(engine, batch, split=ONE_MICRO_BATCH),
            forward_only=True,
            outputs=[HeadOutput.LOGPROB],
        )
    return engine.unshard_outputs(result.outputs, sample_ids=batch.sample_ids).columns[
        HeadOutput.LOGPROB
    ]


ALL_LINEAR = LoraSpec(rank=4, alpha=8.0)
WITHOUT_GATES = replace(ALL_LINEAR, exclude_modules=("shared_expert_gate",))


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("deepseek_v3", replace(ALL_LINEAR, target_parameters=BOTH)),
        ("nemotron_h", ALL_LINEAR),
        # Nightly: each builds an engine and two models. The two of every day have both forms of
        # names, in target_modules and in target_parameters.
        *(
            pytest.param(*pair, marks=pytest.mark.nightly)
            for pair in [
                ("deepseek_v3", ALL_LINEAR),
                ("glm4_moe", ALL_LINEAR),
                ("glm4_moe", replace(ALL_LINEAR, target_parameters=BOTH)),
                ("mixtral", ALL_LINEAR),
                ("qwen3_next", WITHOUT_GATES),
                ("qwen3_5_moe_text", WITHOUT_GATES),
            ]
        ),
    ],
)
def test_adapter_of_all_linear_layers_computes_the_same_in_peft_and_merged(
    run_in, oracle, tmp_path, family, lora
):
    # A high learning rate, so that a single update changes the log-probs.
    setup = replace(
        oracle.make_setup(FAMILIES[family], optimizer=replace(ADAMW, lr=0.05)), lora=lora
    )
    batch = oracle.get_batch(model=FAMILIES[family])
    content, weights, logprobs = run_in("ep2", train_and_export, setup=setup, batch=batch)[0]
    adapter = save_adapter(*content, folder=tmp_path / "adapter")
    merged = tmp_path / "merged"
    merged.mkdir()
    shutil.copy(Path(setup.model_path) / "config.json", merged)
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()},
        merged / "model.safetensors",
        {"format": "pt"},
    )
    for export in (
        replace(setup, lora=LoraSpec(path=str(adapter))),
        replace(setup, lora=LoraSpec(), model_path=str(merged)),
    ):
        expected = oracle.get_outputs(export, batch, HeadOutput.LOGPROB)
        assert_close(logprobs, expected, get_family_logprob(family), quantity="log-probs")


@pytest.mark.parametrize("direction", [("megatron", "fsdp"), ("fsdp", "megatron")], ids="-to-".join)
@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("deepseek_v3", replace(ALL_LINEAR, target_parameters=BOTH)),
        # Nightly: each pair builds four engines. The first has experts and other layers.
        *(
            pytest.param(*pair, marks=pytest.mark.nightly)
            for pair in [
                ("deepseek_v3", ALL_LINEAR),
                ("glm4_moe", replace(ALL_LINEAR, target_parameters=BOTH)),
                ("qwen3_next", WITHOUT_GATES),
            ]
        ),
    ],
)
def test_other_engine_loads_adapters_of_dense_mlps_and_shared_experts(
    run_in, oracle, tmp_path, family, lora, direction
):
    pytest.importorskip(
        "temper_engine_fsdp",
        reason="the other engine is not installed: pip install ./packages/engine-fsdp",
    )
    # A high learning rate, so that a single update changes the log-probs.
    setup = replace(
        oracle.make_setup(FAMILIES[family], optimizer=replace(ADAMW, lr=0.05)), lora=lora
    )
    batch = oracle.get_batch(model=FAMILIES[family])
    content, logprobs = run_in(
        "1-rank", update_and_export_adapter, engine=direction[0], setup=setup, batch=batch
    )[0]
    saved = replace(
        setup, lora=LoraSpec(path=str(save_adapter(*content, folder=tmp_path / "adapter")))
    )
    loaded = run_in(
        "1-rank", compute_logprobs_in_new_engine, engine=direction[1], setup=saved, batch=batch
    )[0]
    assert_close(loaded, logprobs, get_family_logprob(family), quantity="log-probs")
    base = oracle.get_outputs(replace(setup, lora=LoraSpec()), batch, HeadOutput.LOGPROB)
    assert (loaded - base).abs().max() > 0.01


def train_and_export(rank, *, setup, batch):
    """Return the contents of PEFT's two files, the merged weights, and log-probs of the engine."""
    engine = rank.temporary_engine(setup)
    train(engine, [batch])
    return engine.export_adapter(), collect_weights(engine), compute_logprobs(engine, batch)


LINEAR_WEIGHTS = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("deepseek_v3", "tp2-sp-ep2"),
        # Nightly: the first layout has more groups of ranks than these.
        *(
            pytest.param(*pair, marks=pytest.mark.nightly)
            for pair in [
                ("glm4_moe", "ep2"),
                ("nemotron_h", "ep2"),
                ("nemotron_h", "tp2-sp"),
                ("qwen3_5_moe_text", "tp2-sp-ep2"),
                ("qwen3_5_moe_text", "cp2-ep2"),
            ]
        ),
    ],
)
def test_gradient_of_dense_and_shared_expert_adapters_equals_peft(run_in, oracle, family, layout):
    fields = (
        {"target_modules": ["o_proj"], "target_parameters": list(LINEAR_WEIGHTS)}
        if family in ("deepseek_v3", "glm4_moe")
        else {"target_modules": ["o_proj", "up_proj", "down_proj"]}
    )
    adapter = TinyAdapter(name=f"shared-{family}", model=FAMILIES[family], fields=fields)
    setup, batch = oracle.make_adapter_setup(adapter), oracle.get_batch(model=FAMILIES[family])
    expected = oracle.get_update(setup, ClippedPpoProbe(), batch)
    assert any(".shared_expert" in name for name in expected.gradients)
    update = run_update(run_in, layout, setup=setup, batch=batch)[0]
    assert_all_close(
        update.gradients, expected.gradients, get_family_gradient(family), quantity="gradient"
    )
    assert_close(update.grad_norm, expected.grad_norm, LOSS, quantity="gradient norm")


DEEPSEEK = {**FAMILIES["deepseek_v3"].settings, **FAMILIES["deepseek_v3"].architecture}


def test_adapter_of_dense_mlps_and_shared_experts_names_their_weights(start):
    targets = r".*\.(layers\.0\.mlp\.(gate|up|down)_proj|shared_experts\.down_proj)"
    lora = replace(ALL_LINEAR, target_modules=targets)
    peft_config, _ = start(model=ModelSpec(architecture=DEEPSEEK), lora=lora).export_adapter()
    # PEFT would take these names in target_modules for matrices of experts.
    assert peft_config["target_modules"] == []
    assert set(peft_config["target_parameters"]) == {
        "down_proj.weight",
        *(f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up")),
    }


def test_dropout_that_peft_cannot_load_in_these_layers_is_refused(config):
    lora = replace(ALL_LINEAR, dropout=0.1)
    match = r"lora.dropout is 0.1, but .* adapters of down_proj, gate_proj, up_proj only without"
    with pytest.raises(ConfigError, match=match):
        check_model(replace(config, model=ModelSpec(architecture=DEEPSEEK), lora=lora))


@pytest.mark.parametrize(
    "targets", [["o_proj", "down_proj"], "all-linear", r".*layers\.0\..*down_proj"]
)
def test_saved_adapter_whose_names_peft_takes_for_experts_is_refused(config, tmp_path, targets):
    LoraConfig(r=3, target_modules=targets).save_pretrained(tmp_path)
    lora = LoraSpec(path=str(tmp_path))
    with pytest.raises(ConfigError, match="of which PEFT applies some to the experts"):
        check_model(replace(config, model=ModelSpec(architecture=DEEPSEEK), lora=lora))


def test_gate_of_shared_experts_is_refused_with_the_layers_that_can_be_adapted(config):
    tiny = FAMILIES["qwen3_5_moe_text"]
    model = ModelSpec(architecture={**tiny.settings, **tiny.architecture})
    for targets in ("all-linear", ("q_proj", "shared_expert_gate"), r".*\.shared_expert_gate"):
        lora = replace(ALL_LINEAR, target_modules=targets)
        with pytest.raises(
            ConfigError,
            match=r"shared_expert_gate, which is a parameter and .* use some of .*up_proj",
        ):
            check_model(replace(config, model=model, lora=lora))


def test_pattern_is_saved_as_names_where_peft_would_adapt_other_layers(start):
    lora = replace(ALL_LINEAR, target_modules=r".*\.1\..*o_proj")
    engine = start(model=ModelSpec(architecture=DEEPSEEK), lora=lora)
    peft_config, tensors = engine.export_adapter()
    assert peft_config["target_modules"] == ["model.layers.1.self_attn.o_proj"]
    assert len(tensors) == 2


def test_new_adapter_has_the_initial_values_of_peft(start):
    _, tensors = start(model=ModelSpec(architecture=ARCHITECTURE), lora=LORA).export_adapter()
    fields = dict(ARCHITECTURE)
    network = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(fields.pop("model_type"), **fields)
    )
    torch.manual_seed(0)
    inject_adapter_in_model(
        LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj"], target_parameters=list(BOTH)),
        network,
    )
    expected = {
        f"base_model.model.{name.replace('.default.', '.')}": p
        for name, p in network.named_parameters()
        if ".lora_" in name
    }
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("kind", ["experts_a", "experts_b", "gated_experts_b"])
def test_joining_shards_is_the_inverse_of_taking_them(kind):
    # Four experts of rank 3: A is [12, 8], B [16, 12].
    full = (
        torch.arange(12.0 * 8).view(12, 8)
        if kind == "experts_a"
        else torch.arange(16.0 * 12).view(16, 12)
    )
    shards = [
        take_expert_shard(full, kind=kind, num_experts=4, rank=rank, num_ranks=2)
        for rank in range(2)
    ]
    assert {tuple(shard.shape) for shard in shards} == {
        (4, 3, 4) if kind == "experts_a" else (4, 8, 3)
    }
    assert torch.equal(join_expert_shards(shards, kind=kind), full)


@pytest.mark.parametrize(
    ("lora", "match"),
    [
        (
            LoraSpec(rank=4, alpha=8.0, target_modules=("q_proj", "up_proj")),
            r"'mlp.experts.down_proj'.* in lora.target_parameters",
        ),
        (
            replace(LORA, target_parameters=("experts.up_proj",)),
            "names experts.up_proj, but only tensors of experts can be named",
        ),
        (
            replace(LORA, target_parameters=("q_proj.weight",)),
            "names q_proj.weight, but only tensors of experts",
        ),
    ],
)
def test_error_names_what_cannot_be_adapted_in_a_mixture_of_experts(config, lora, match):
    with pytest.raises(ConfigError, match=match):
        MegatronEngine(
            replace(config, model=ModelSpec(architecture=ARCHITECTURE), lora=lora)
        ).init_model()


def test_adapter_of_experts_of_a_dense_model_is_refused(config):
    with pytest.raises(ConfigError, match="this model has no experts"):
        MegatronEngine(replace(config, lora=LORA)).init_model()


def test_adapter_of_experts_without_gates_is_refused(config):
    architecture = FAMILIES["nemotron_h"].settings | FAMILIES["nemotron_h"].architecture
    lora = replace(LORA, target_parameters=("experts.down_proj",))
    with pytest.raises(CapabilityError, match="no adapters for experts without gates"):
        MegatronEngine(
            replace(config, model=ModelSpec(architecture=architecture), lora=lora)
        ).init_model()


def test_adapter_of_experts_in_one_tensor_is_refused_before_the_start(config):
    model = ModelSpec(architecture=FAMILIES["gpt_oss"].settings | FAMILIES["gpt_oss"].architecture)
    adapted = replace(config, model=model, lora=LORA)
    with pytest.raises(CapabilityError, match="gpt_oss, which are one tensor for all experts"):
        check_model(adapted)
    with pytest.raises(CapabilityError, match="gpt_oss, which are one tensor for all experts"):
        MegatronEngine(adapted).init_model()


def test_rank_that_peft_doubles_for_all_linear_is_refused(config, tmp_path):
    doubled = {r".*\.gate_up_proj": 6}
    LoraConfig(
        r=3, target_modules=["q_proj"], target_parameters=["gate_up_proj"], rank_pattern=doubled
    ).save_pretrained(tmp_path)
    with pytest.raises(CapabilityError, match="sets rank_pattern"):
        MegatronEngine(
            replace(
                config,
                model=ModelSpec(architecture=ARCHITECTURE),
                lora=LoraSpec(path=str(tmp_path)),
            )
        ).init_model()
