"""Test adapters: initial values equal PEFT's, replicated parameters, and refusals."""

import json
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from transformers import AutoConfig, AutoModelForCausalLM

from temper_engine_api.conformance.harness.measurements import (
    ONE_MICRO_BATCH,
    collect_state,
    collect_weights,
    load_and_train,
    rank_slice,
    run_update,
    train,
    train_and_save,
)
from temper_engine_api.conformance.harness.rank import ADAMW
from temper_engine_api.conformance.harness.tolerances import assert_all_equal, assert_same_state
from temper_engine_api.conformance.inputs.probes import SftProbe
from temper_engine_api.conformance.inputs.tiny_models import QWEN2_GROUPED
from temper_engine_api.errors import CapabilityError, CheckpointError, ConfigError
from temper_engine_api.registry import load_conformance_layouts
from temper_engine_api.specs import LoraSpec, ModelSpec
from temper_engine_api.weights import NamedWeight
from temper_engine_megatron.engine import MegatronEngine

LAYOUTS = {layout.name: layout for layout in load_conformance_layouts("megatron")}
LORA = LoraSpec(rank=4, alpha=8.0)


def test_new_adapter_has_the_initial_values_of_peft(start, config):
    _, tensors = start(lora=LORA).export_adapter()
    fields = dict(config.model.architecture)
    network = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(fields.pop("model_type"), **fields)
    )
    torch.manual_seed(config.model.seed)
    inject_adapter_in_model(
        LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", exclude_modules=["lm_head"]),
        network,
    )
    expected = {
        f"base_model.model.{name.replace('.default.', '.')}": p
        for name, p in network.named_parameters()
        if ".lora_" in name
    }
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


@pytest.mark.bitwise
# Nightly: with sequence parallelism more parameters are replicated.
@pytest.mark.parametrize("layout", [pytest.param("tp2", marks=pytest.mark.nightly), "tp2-sp"])
def test_replicated_parameters_stay_equal_on_ranks_under_dropout(
    rank_pool, oracle, layout, tmp_path
):
    setup = replace(
        oracle.make_setup(QWEN2_GROUPED, optimizer=ADAMW), lora=replace(LORA, dropout=0.5)
    )
    batches = [oracle.get_batch(seed=seed) for seed in range(3)]

    def run(job, **arguments):
        return rank_pool.run(
            job,
            engine="megatron",
            layout=LAYOUTS[layout],
            arguments={"setup": setup, **arguments},
        )

    first, second = run(collect_replicated_parameters, batches=batches)
    assert len(first[0]) > 8
    assert all(torch.equal(first[0][name], second[0][name]) for name in first[0])
    # Dropout masks are drawn from generators whose states the checkpoint contains.
    run(train_and_save, batches=batches[:2], folder=tmp_path, step=2)
    resumed = run(load_and_train, batches=batches[2:], folder=tmp_path)[0]
    assert_same_state(resumed[0].state, first[1])


def collect_replicated_parameters(rank, *, setup, batches):
    """Return this rank's copies of replicated parameters and the full state after updates."""
    engine = rank.temporary_engine(setup)
    updates = train(engine, batches)
    chunk = engine._components.runner._chunks.unwrapped[0]
    trained = {
        name: parameter for name, parameter in chunk.named_parameters() if parameter.requires_grad
    }
    copies = {
        name: p.detach().clone()
        for name, p in trained.items()
        if not vars(p)["tensor_model_parallel"]
    }
    return copies, updates[-1].state


def test_only_the_adapter_has_gradients(start):
    engine = start(lora=LORA)
    chunk = engine._components.runner._chunks.unwrapped[0]
    trained = [name for name, parameter in chunk.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 7 * 2  # two layers of seven modules, A and B each
    assert all(".adapter." in name for name in trained)


@pytest.mark.parametrize(
    ("lora", "match"),
    [
        (
            replace(LORA, target_modules=("q_proj", "embed_tokens")),
            "matches model.embed_tokens, which cannot be adapted",
        ),
        (
            replace(LORA, target_modules=("query",)),
            "lora.target_modules names query, but no layer of this model has that name",
        ),
        (
            replace(LORA, target_modules=("q_proj", "value")),
            "lora.target_modules names value, but .* use another of down_proj, .*q_proj",
        ),
        (
            replace(LORA, target_modules=("q_proj", "self_attn")),
            "lora.target_modules names self_attn, but no layer",
        ),
        (
            replace(LORA, target_modules="nope.*"),
            r"lora.target_modules 'nope\.\*' matches no linear layer of this model",
        ),
        (
            replace(LORA, exclude_modules=("o_proj", "value")),
            "lora.exclude_modules names value, but no layer of this model has that name",
        ),
        (
            replace(LORA, exclude_modules="nope.*"),
            r"lora.exclude_modules names nope\.\*, but no layer of this model has that name",
        ),
        (replace(LORA, modules_to_save=("lm_head",)), "ties it to the input embedding"),
        (replace(LORA, modules_to_save=("norm",)), "can train only the output layer in full"),
    ],
)
def test_error_names_the_module_that_cannot_be_adapted(config, lora, match):
    with pytest.raises(ConfigError, match=match):
        MegatronEngine(replace(config, lora=lora)).init_model()
    assert not torch.distributed.is_initialized()


def test_adapter_of_another_kind_or_layout_is_refused_with_what_to_do(config, tmp_path):
    def refusal(folder):
        with pytest.raises((CapabilityError, ConfigError)) as caught:
            MegatronEngine(replace(config, lora=LoraSpec(path=str(folder)))).init_model()
        return str(caught.value)

    private = tmp_path / "private"
    private.mkdir()
    (private / "mp_rank_00_adapter.pt").touch()
    assert f"`temper-migrate checkpoint {private} --to peft --out NEW`" in refusal(private)
    other = tmp_path / "other"
    other.mkdir()
    assert "has no adapter_config.json" in refusal(other)
    (other / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3"}))
    assert "has type IA3" in refusal(other)
    LoraConfig(r=4, target_modules=["q_proj"], rank_pattern={"q_proj": 8}).save_pretrained(other)
    assert "sets rank_pattern" in refusal(other)


def test_loading_a_checkpoint_of_another_system_is_refused(start, tmp_path):
    (tmp_path / "dist_ckpt").mkdir()
    with pytest.raises(CheckpointError, match="temper-migrate checkpoint"):
        start(lora=LORA).load_checkpoint(str(tmp_path))


def test_head_of_a_critic_is_trained_with_its_adapter(start, config):
    engine = start(
        model=ModelSpec(architecture=config.model.architecture, model_type="value_model"), lora=LORA
    )
    peft_config, tensors = engine.export_adapter()
    assert peft_config["modules_to_save"] == ["score"]
    assert {"base_model.model.score.weight", "base_model.model.score.bias"} <= tensors.keys()


def test_replaced_base_weights_are_saved_without_moments(start, batch, tmp_path):
    engine = start(lora=LORA)
    with engine.disable_adapter():
        base = collect_weights(engine)
    engine.load_weights(NamedWeight(name, tensor + 0.01) for name, tensor in base.items())
    update(engine, batch)
    step = engine.save_checkpoint(str(tmp_path), global_step=1)
    other = start(lora=LORA)
    other.load_checkpoint(step)
    assert_all_equal(
        collect_weights(other), collect_weights(engine), quantity="weights with the adapter"
    )
    assert_same_state(collect_state(other), collect_state(engine))
    assert_same_state(update(other, batch).state, update(engine, batch).state)


def update(engine, batch):
    engine.set_loss_fn(SftProbe())
    return run_update(engine, [rank_slice(engine, batch, split=ONE_MICRO_BATCH)])
