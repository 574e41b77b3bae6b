"""Test the engine on one rank: the RFC's loop, offloading, export and rejected settings.

The conformance kit tests the contract.
"""

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.errors import CapabilityError, ConfigError, EngineStateError, WeightError
from temper_engine_api.hooks import Context
from temper_engine_api.objective import HeadOutput
from temper_engine_api.specs import Compute, LoraSpec, ModelSpec, OffloadSpec, PrecisionSpec
from temper_engine_api.weights import NamedWeight
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.engine import FSDPEngine

Start = Callable[..., FSDPEngine]
EVERYTHING_OFFLOADED = OffloadSpec(parameters=True, optimizer=True)


def mean_nll(
    data: SequenceBatch, predictions: Mapping[str, Tensor], ctx: Context
) -> tuple[Tensor, Context]:
    return -predictions["logprob"][data.loss_mask].mean(), ctx


def train(engine: FSDPEngine, train_loader: list[SequenceBatch]) -> list[float]:
    """Run the training loop of the RFC."""
    losses = []
    ctx: Context = {}
    engine.set_loss_fn(mean_nll)
    for batch in train_loader:
        engine.optimizer_zero_grad()
        with engine.train_mode():
            preds, loss, ctx = engine.forward_backward_step(
                batch, ctx, forward_only=False, preprocess_fn=None, postprocess_fn=None
            )
        grad_norm = engine.optimizer_step()
        current_lr = engine.lr_scheduler_step()
        assert preds is not None
        assert grad_norm > 0
        assert current_lr == 1e-2
        losses.append(float(loss))
    with engine.eval_mode():
        preds, ctx = engine.forward_backward_step(train_loader[0], ctx, forward_only=True)
    assert preds is not None
    losses.append(-float(preds["logprob"][train_loader[0].loss_mask].mean()))
    return losses


def weights_of(engine: FSDPEngine) -> dict[str, Tensor]:
    with engine.export_weights() as stream:
        return dict(stream)


def test_the_training_loop_of_the_rfc_lowers_the_loss(start: Start, batch: SequenceBatch) -> None:
    losses = train(start(), [batch] * 6)
    # Random weights: close to log 61 = 4.11 at first.
    assert 3.5 < losses[0] < 4.7
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.bitwise
def test_offloading_everything_does_not_change_a_bit(start: Start, batch: SequenceBatch) -> None:
    here, away = start(), start(offload=EVERYTHING_OFFLOADED)
    assert train(here, [batch] * 3) == train(away, [batch] * 3)
    offloaded = weights_of(away)
    for name, tensor in weights_of(here).items():
        assert torch.equal(tensor, offloaded[name]), name


def test_offloaded_parameters_leave_the_device_between_contexts(
    start: Start, batch: SequenceBatch
) -> None:
    engine = start(offload=EVERYTHING_OFFLOADED)

    def resident_bytes() -> int:
        return sum(t.untyped_storage().nbytes() for t in engine._components.iterate_model_tensors())

    def fail_inside() -> None:
        with engine.eval_mode():
            assert resident_bytes() > 0
            raise RuntimeError("the body fails")

    assert resident_bytes() == 0
    with pytest.raises(RuntimeError, match="the body fails"):
        fail_inside()
    assert resident_bytes() == 0


def test_tensors_stay_where_to_moved_them_until_the_next_call(
    start: Start, batch: SequenceBatch
) -> None:
    engine = start()
    before = weights_of(engine)
    engine.to("cpu")
    assert engine._components.offloader.is_offloaded("parameters")
    for name, tensor in weights_of(engine).items():
        assert torch.equal(tensor, before[name]), name
    assert engine._components.offloader.is_offloaded("parameters")
    engine.to("device")
    assert not engine._components.offloader.is_offloaded("parameters")


def test_exported_weights_are_copies(start: Start, batch: SequenceBatch) -> None:
    engine = start()
    exported = weights_of(engine)
    kept = {name: tensor.clone() for name, tensor in exported.items()}
    train(engine, [batch])
    assert all(torch.equal(exported[name], kept[name]) for name in kept)


def test_exported_weights_load_in_transformers_with_the_same_logprobs(
    start: Start, batch: SequenceBatch
) -> None:
    engine = start()
    train(engine, [batch])
    model = AutoModelForCausalLM.from_config(
        deepcopy(engine._components.hf_config), attn_implementation="eager"
    ).eval()
    missing, unexpected = model.load_state_dict(weights_of(engine), strict=False)
    assert (missing, unexpected) == (
        ["lm_head.weight"],
        [],
    )  # tied: the index of a safetensors file has no head either
    with engine.eval_mode():
        outputs = engine.forward_backward_batch(
            engine.shard_data(batch, max_tokens=64), forward_only=True, outputs=[HeadOutput.LOGPROB]
        ).outputs
    assert outputs is not None
    outputs = outputs.reorder(batch.sample_ids)
    tokens = batch.tokens[:9]  # sample 0, at temperature 1
    with torch.no_grad():
        logits = model(tokens[None]).logits[0]
    expected = torch.log_softmax(logits, -1)[:-1].gather(1, tokens[1:, None])[:, 0]
    torch.testing.assert_close(
        outputs.columns[HeadOutput.LOGPROB][1:9], expected, rtol=1e-5, atol=1e-5
    )


def test_missing_weight_leaves_all_weights_unchanged(start: Start) -> None:
    engine = start()
    before = weights_of(engine)
    altered = [NamedWeight(name, tensor + 1) for name, tensor in before.items()]
    with pytest.raises(WeightError, match=r"missing model\.norm\.weight"):
        engine.load_weights([weight for weight in altered if weight.name != "model.norm.weight"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(engine).items())


def test_bf16_compute_exports_bf16_and_keeps_float32_masters(
    start: Start, batch: SequenceBatch
) -> None:
    engine = start(precision=PrecisionSpec(compute="bf16"))
    losses = train(engine, [batch] * 4)
    assert losses[-1] < losses[0]
    assert {tensor.dtype for tensor in weights_of(engine).values()} == {torch.bfloat16}
    assert {state.master.dtype for state in engine.export_state()} == {torch.float32}


@pytest.mark.bitwise
def test_activation_checkpointing_does_not_change_a_bit(start: Start, batch: SequenceBatch) -> None:
    assert train(start(), [batch] * 2) == train(start(activation_checkpointing=True), [batch] * 2)


@pytest.mark.bitwise
def test_keeping_gathered_parameters_does_not_change_a_bit(
    start: Start, batch: SequenceBatch
) -> None:
    assert train(start(), [batch] * 2) == train(start(reshard_after_forward=False), [batch] * 2)


def test_deterministic_engine_restores_the_global_setting(
    start: Start, batch: SequenceBatch
) -> None:
    train(start(deterministic=True), [batch])
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.bitwise
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_a_deterministic_run_repeats_bit_for_bit_on_many_threads(
    start: Start, batch: SequenceBatch, compute: Compute
) -> None:
    threads, ends = torch.get_num_threads(), []
    torch.set_num_threads(4)
    try:
        for _ in range(2):
            engine = start(deterministic=True, precision=PrecisionSpec(compute=compute))
            losses = train(engine, [batch] * 4)
            ends.append(
                (
                    losses,
                    [
                        (state.master, state.first_moment, state.second_moment)
                        for state in engine.export_state()
                    ],
                )
            )
    finally:
        torch.set_num_threads(threads)
    assert ends[0][0] == ends[1][0]
    for first, second in zip(ends[0][1], ends[1][1], strict=True):
        assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_engine_trains_after_a_loss_function_has_raised(start: Start, batch: SequenceBatch) -> None:
    engine = start()

    def failing(
        data: SequenceBatch, predictions: Mapping[str, Tensor], ctx: Context
    ) -> tuple[Tensor, Context]:
        raise ZeroDivisionError("in the user's loss")

    engine.set_loss_fn(failing)
    with pytest.raises(ZeroDivisionError), engine.train_mode():
        engine.forward_backward_step(batch)
    engine.optimizer_zero_grad()
    assert train(engine, [batch] * 3) == train(start(), [batch] * 3)


def test_zero_grad_also_drops_unreduced_gradients(start: Start, batch: SequenceBatch) -> None:
    engine, fresh = start(), start()
    engine.set_loss_fn(mean_nll)
    with engine.train_mode():
        engine.forward_backward_step(batch.select([0, 1]))
    engine.optimizer_zero_grad()
    assert train(engine, [batch]) == train(fresh, [batch])


def test_an_unknown_architecture_is_named(start: Start) -> None:
    with pytest.raises(
        ConfigError, match="'qwen99', which the installed version of transformers does not know"
    ):
        start(model=ModelSpec(architecture={"model_type": "qwen99"}))


def test_a_layer_with_its_own_attention_is_rejected_in_the_first_pass(
    start: Start, batch: SequenceBatch
) -> None:
    engine = start()
    layer = next(
        module
        for module in engine._components.sharded.root.modules()
        if type(module).__name__.endswith("Qwen2DecoderLayer")
    )
    layer.self_attn.forward = lambda hidden_states, **_: (
        hidden_states.cumsum(1),
        None,
    )  # mixes tokens, and asks no kernel
    with pytest.raises(
        CapabilityError,
        match=r"1 attention calls of Qwen2ForCausalLM went through.* but it has 2 layers",
    ):
        train(engine, [batch])


@pytest.mark.parametrize(("window", "is_refused"), [(13, True), (14, False)])
def test_a_window_not_passed_to_attention_is_rejected_for_longer_sequences(
    start: Start, config: FSDPConfig, batch: SequenceBatch, window: int, is_refused: bool
) -> None:
    fields = {
        "model_type": "phimoe",
        "num_local_experts": 2,
        "head_dim": 8,
        "tie_word_embeddings": False,
        "sliding_window": window,
    }
    engine = start(model=ModelSpec(architecture={**config.model.architecture, **fields}))
    with (
        pytest.raises(
            CapabilityError, match=r"has a sliding window of 13.*a sequence has 14 tokens"
        )
        if is_refused
        else nullcontext()
    ):
        train(engine, [batch])


def test_a_window_that_a_model_does_not_read_is_not_changed(
    start: Start, config: FSDPConfig, batch: SequenceBatch
) -> None:
    settings = {**config.model.architecture, "model_type": "llama"}
    with_window = start(model=ModelSpec(architecture={**settings, "sliding_window": 4}))
    assert train(with_window, [batch]) == train(
        start(model=ModelSpec(architecture=settings)), [batch]
    )


def test_a_wrong_module_name_lists_those_there_are(start: Start, config: FSDPConfig) -> None:
    changes: dict[str, Any] = {"wrap_modules": ("Qwen9Layer",)}
    sentence = r"wrap_modules names \['Qwen9Layer'\].*Qwen2DecoderLayer"
    with pytest.raises(ConfigError, match=sentence):
        start(**changes)
    with pytest.raises(ConfigError, match=sentence):
        FSDPEngine.check_model(replace(config, **changes))


def test_failed_init_model_destroys_the_process_group_it_created(start: Start) -> None:
    with pytest.raises(ConfigError, match="Qwen9Layer"):
        start(wrap_modules=("Qwen9Layer",))
    assert not torch.distributed.is_initialized()


def test_nested_modules_cannot_be_wrapped_together(start: Start, config: FSDPConfig) -> None:
    changes: dict[str, Any] = {
        "wrap_modules": ("Qwen2DecoderLayer", "Qwen2MLP"),
        "wrap_together": 2,
    }
    sentence = "wrap_modules names Qwen2DecoderLayer, which contains a Qwen2MLP"
    with pytest.raises(ConfigError, match=sentence):
        start(**changes)
    with pytest.raises(ConfigError, match=sentence):
        FSDPEngine.check_model(replace(config, **changes))


def test_lora_without_peft_names_the_extra_to_install(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "temper_engine_fsdp.training.lora_adapter", raising=False)
    monkeypatch.setitem(
        sys.modules, "peft", None
    )  # what is None there can't be imported, as if it were not installed
    with pytest.raises(
        ConfigError,
        match=r"peft is not installed: run pip install '\./packages/engine-fsdp\[lora\]'",
    ):
        start(lora=LoraSpec(rank=2, alpha=4.0))


def test_nothing_works_after_close(start: Start) -> None:
    engine = start()
    engine.close()
    engine.close()
    with pytest.raises(EngineStateError, match="after close"):
        engine.to("cpu")


def test_a_second_engine_follows_in_the_same_process(start: Start, batch: SequenceBatch) -> None:
    first = start()
    losses = train(first, [batch] * 2)
    first.close()
    assert train(start(), [batch] * 2) == losses


def test_checkpoint_contains_a_model_that_transformers_loads(start: Start, tmp_path: Path) -> None:
    engine = start(save_huggingface_weights=True)
    step = engine.save_checkpoint(str(tmp_path), global_step=1)
    model = AutoModelForCausalLM.from_pretrained(
        next(Path(step).rglob("huggingface")), dtype=torch.float32
    )
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach(), weights_of(engine)[name]), name


# Nightly: compiling the layers takes longer than the other tests of this file.
@pytest.mark.nightly
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"
)  # torch's compiler looks at gradients of tensors that have none
def test_compiled_layers_and_kept_logits_do_not_change_training(
    start: Start, batch: SequenceBatch
) -> None:
    expected = train(start(), [batch] * 3)
    assert train(start(head_keeps_logits=True), [batch] * 3) == pytest.approx(expected, rel=1e-5)
    assert train(start(head_keeps_logits=True, compile_layers=True), [batch] * 3) == pytest.approx(
        expected, rel=1e-5
    )
