"""Architectures beyond those of the conformance kit: the same log-probs as transformers' own attention, one sequence at a time."""

from collections.abc import Callable, Mapping

import pytest
import torch
from transformers import AutoModelForCausalLM

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.objective import Query
from temper_engine_api.specs import ModelSpec, Scalar
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.engine import FSDPEngine

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


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_packed_log_probs_are_those_of_transformers(
    start: Callable[..., FSDPEngine], config: FSDPConfig, batch: SequenceBatch, name: str
) -> None:
    architecture = {**config.model.architecture, **ARCHITECTURES[name]}
    engine = start(model=ModelSpec(architecture=architecture))
    model = AutoModelForCausalLM.from_config(engine._parts.hf_config, attn_implementation="eager").eval()
    with engine.export_weights() as stream:
        missing, unexpected = model.load_state_dict(dict(stream), strict=False)
    assert (set(missing) <= {"lm_head.weight"}, unexpected) == (True, [])
    model.tie_weights()
    with engine.eval_mode():
        packed = engine.shard_data(batch, max_tokens=64)
        outputs = engine.forward_backward_batch(packed, forward_only=True, outputs=[Query.LOGPROB]).outputs
    assert outputs is not None
    found = outputs.in_order_of(batch.sample_ids).columns[Query.LOGPROB]
    for b in range(batch.num_sequences):
        first, end = int(batch.sequence_starts[b]), int(batch.sequence_starts[b + 1])
        tokens = batch.tokens[first:end]
        with torch.no_grad():
            logits = model(tokens[None]).logits[0] / batch.temperature[b]
        expected = torch.log_softmax(logits, -1)[:-1].gather(1, tokens[1:, None])[:, 0]
        torch.testing.assert_close(found[first + 1 : end], expected, rtol=1e-5, atol=1e-5)
