"""Test architectures beyond the conformance kit against transformers' own attention.

Log-probs and gradients of each sequence alone, and the update after loading weights.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.conformance.harness.measurements import (
    ONE_MICRO_BATCH,
    collect_weights,
    rank_slice,
    run_update,
)
from temper_engine_api.conformance.inputs.probes import SftProbe
from temper_engine_api.errors import CapabilityError, WeightError
from temper_engine_api.objective import HeadOutput
from temper_engine_api.specs import ModelSpec, Scalar
from temper_engine_api.weights import NamedWeight
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.engine import FSDPEngine
from temper_engine_fsdp.model.weight_names import PartJoiner, read_file_names

ARCHITECTURES: Mapping[str, Mapping[str, Scalar]] = {
    "mistral": {"model_type": "mistral", "tie_word_embeddings": False, "sliding_window": 6},
    "gemma": {"model_type": "gemma", "tie_word_embeddings": True, "head_dim": 8},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "tie_word_embeddings": False,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "head_dim": 8,
    },
}
LOGIT_FACTORS: Mapping[str, Mapping[str, Scalar]] = {
    "cohere": {"model_type": "cohere", "logit_scale": 0.25},
    "cohere-zero": {"model_type": "cohere", "logit_scale": 0.0},
    "granite": {"model_type": "granite", "logits_scaling": 4.0},
    "hyperclovax": {"model_type": "hyperclovax", "logits_scaling": 0.125},
}
"""Models whose logits are a multiple of the head's; the first two and the last one multiply."""


def twin_of(engine: FSDPEngine) -> PreTrainedModel:
    """Load the same weights with transformers."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        deepcopy(engine._components.hf_config), attn_implementation="eager"
    ).eval()
    joining = PartJoiner(
        {name: tensor.shape for name, tensor in model.state_dict().items()},
        file_names=read_file_names(model),
    )
    with engine.export_weights() as stream:
        wholes = dict(filter(None, (joining.add(*weight) for weight in stream)))
        missing, unexpected = model.load_state_dict(wholes, strict=False)
    assert (set(missing) <= {"lm_head.weight"}, unexpected) == (True, [])
    model.tie_weights()
    return model


def logprobs_of(model: PreTrainedModel, batch: SequenceBatch, b: int) -> Tensor:
    """Return the log-probs of one sequence, without its first token."""
    tokens = batch.tokens[int(batch.sequence_starts[b]) : int(batch.sequence_starts[b + 1])]
    logits = model(tokens[None]).logits[0] / batch.temperature[b]
    return torch.log_softmax(logits, -1)[:-1].gather(1, tokens[1:, None])[:, 0]


def update(engine: FSDPEngine, batch: SequenceBatch) -> float:
    engine.set_loss_fn(
        lambda data, predictions, ctx: (-predictions["logprob"][data.loss_mask].mean(), ctx)
    )
    engine.optimizer_zero_grad()
    with engine.train_mode():
        engine.forward_backward_step(batch)
    return engine.optimizer_step()


@pytest.mark.parametrize("name", [*ARCHITECTURES, *LOGIT_FACTORS])
def test_packed_logprobs_equal_transformers(
    start: Callable[..., FSDPEngine], config: FSDPConfig, batch: SequenceBatch, name: str
) -> None:
    # Large weights, so that a wrong factor shows.
    fields = {**ARCHITECTURES, **LOGIT_FACTORS}[name] | {"initializer_range": 0.3}
    engine = start(model=ModelSpec(architecture={**config.model.architecture, **fields}))
    model = twin_of(engine)
    with engine.eval_mode():
        packed = engine.shard_data(batch, max_tokens=64)
        outputs = engine.forward_backward_batch(
            packed, forward_only=True, outputs=[HeadOutput.LOGPROB]
        ).outputs
    assert outputs is not None
    packed_logprobs = outputs.reorder(batch.sample_ids).columns[HeadOutput.LOGPROB]
    for b in range(batch.num_sequences):
        first, end = int(batch.sequence_starts[b]), int(batch.sequence_starts[b + 1])
        with torch.no_grad():
            torch.testing.assert_close(
                packed_logprobs[first + 1 : end], logprobs_of(model, batch, b), rtol=1e-5, atol=1e-5
            )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradients_equal_transformers(
    start: Callable[..., FSDPEngine], config: FSDPConfig, batch: SequenceBatch, name: str
) -> None:
    engine = start(
        model=ModelSpec(architecture={**config.model.architecture, **ARCHITECTURES[name]})
    )
    model = twin_of(engine)
    trained = batch.loss_mask.split(batch.lengths.tolist())
    total = torch.stack(
        [logprobs_of(model, batch, b)[mask[1:]].sum() for b, mask in enumerate(trained)]
    ).sum()
    (-total / batch.loss_mask.sum()).backward()
    update(engine, batch)
    gradients = {
        part: grad
        for name, p in model.named_parameters()
        if p.grad is not None
        for part, grad in read_file_names(model).split(name, p.grad)
    }
    for state in engine.export_state():
        expected = gradients[state.name]
        # The first moment after one update of AdamW is a tenth of the gradient.
        torch.testing.assert_close(
            state.first_moment * 10, expected, rtol=1e-4, atol=1e-6, msg=state.name
        )


@pytest.mark.bitwise
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_resumed_run_continues_bit_for_bit(
    start: Callable[..., FSDPEngine],
    config: FSDPConfig,
    batch: SequenceBatch,
    name: str,
    tmp_path: Path,
) -> None:
    spec = ModelSpec(architecture={**config.model.architecture, **ARCHITECTURES[name]})
    engine = start(model=spec)
    update(engine, batch)
    step = engine.save_checkpoint(str(tmp_path), global_step=1)
    other = start(model=spec)
    other.load_checkpoint(step)
    assert [update(other, batch) for _ in range(2)] == [update(engine, batch) for _ in range(2)]


def test_experts_are_exported_under_the_names_of_transformers_files(
    start: Callable[..., FSDPEngine], config: FSDPConfig, batch: SequenceBatch, tmp_path: Path
) -> None:
    engine = start(
        model=ModelSpec(architecture={**config.model.architecture, **ARCHITECTURES["qwen3_moe"]})
    )
    update(engine, batch)
    with engine.export_weights() as stream:
        exported = {name: tensor.clone() for name, tensor in stream}
    twin_of(engine).save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    assert exported.keys() == written.keys()
    assert all(exported[name].equal(tensor) for name, tensor in written.items())

    saved = [
        replace(
            s, **{k: getattr(s, k).clone() for k in ("master", "first_moment", "second_moment")}
        )
        for s in engine.export_state()
    ]
    assert {state.name for state in saved} == written.keys()
    next_norm = update(engine, batch)
    other = start(
        model=ModelSpec(
            architecture={**config.model.architecture, **ARCHITECTURES["qwen3_moe"]}, seed=9
        )
    )
    other.load_state(iter(reversed(saved)))
    assert update(other, batch) == next_norm
    other.load_weights(NamedWeight(name, tensor) for name, tensor in exported.items())
    with other.export_weights() as stream:
        assert all(exported[name].equal(tensor) for name, tensor in stream)


def test_missing_expert_is_named_and_nothing_is_loaded(
    start: Callable[..., FSDPEngine], config: FSDPConfig
) -> None:
    engine = start(
        model=ModelSpec(architecture={**config.model.architecture, **ARCHITECTURES["qwen3_moe"]})
    )
    with engine.export_weights() as stream:
        exported = [NamedWeight(name, tensor.clone()) for name, tensor in stream]
    lacking = "model.layers.0.mlp.experts.2.up_proj.weight"
    with pytest.raises(WeightError, match=f"missing {lacking}"):
        engine.load_weights(
            NamedWeight(name, tensor + 1) for name, tensor in exported if name != lacking
        )
    with engine.export_weights() as stream:
        assert all(
            tensor.equal(before.tensor)
            for (_, tensor), before in zip(stream, exported, strict=True)
        )


def test_experts_that_the_model_declares_inside_a_layer_are_sharded_with_it(
    config: FSDPConfig, start: Callable[..., FSDPEngine], batch: SequenceBatch
) -> None:
    fields = {"model_type": "aria_text", "moe_num_experts": 4, "moe_topk": 2, "pad_token_id": 0}
    engine = start(model=ModelSpec(architecture={**config.model.architecture, **fields}))
    before = collect_weights(engine)
    engine.set_loss_fn(SftProbe())
    run_update(engine, [rank_slice(engine, batch, split=ONE_MICRO_BATCH)])
    name = "model.layers.0.mlp.experts.fc1.weight"
    assert not torch.equal(collect_weights(engine)[name], before[name])


def test_model_that_could_not_be_exported_is_refused_before_training(config: FSDPConfig) -> None:
    # Files have one tensor for gate and up, which transformers loads into two.
    hrm = {"model_type": "hrm_text", "tie_word_embeddings": False, "head_dim": 8}
    refused = replace(config, model=ModelSpec(architecture={**config.model.architecture, **hrm}))
    for check in (FSDPEngine.check_model, lambda config: FSDPEngine(config).init_model()):
        with pytest.raises(CapabilityError, match=r"transformers saves .* of this hrm_text model"):
            check(refused)
