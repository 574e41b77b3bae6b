"""Run one rank of a small training run; test_ranks.py starts it with RANK and WORLD_SIZE.

train_as_rank.py STRATEGY FSDP_SIZE KEEPING FOLDER
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch._C._distributed_c10d import _dump_fr_trace_json

from temper_engine_api.batch import SequenceBatch, from_sequences
from temper_engine_api.objective import Aggregation, HeadOutput, HeadOutputs, LossTerms, Objective
from temper_engine_api.specs import ModelSpec, OptimizerSpec, PrecisionSpec, Scalar
from temper_engine_fsdp.config import FSDPConfig, Strategy
from temper_engine_fsdp.engine import FSDPEngine

# Three heads of 8 and an odd vocabulary: shards of different sizes on two ranks.
ARCHITECTURE: Mapping[str, Scalar] = {
    "model_type": "qwen2",
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NegativeLogprob(Objective):
    """Return the mean negative log-likelihood."""

    aggregation: Aggregation = field(default_factory=Aggregation)

    @property
    def required_outputs(self) -> frozenset[HeadOutput]:
        return frozenset({HeadOutput.LOGPROB})

    def __call__(self, head_outputs: HeadOutputs, batch: SequenceBatch) -> LossTerms:
        return LossTerms(loss=-head_outputs[HeadOutput.LOGPROB])


def make_batch() -> SequenceBatch:
    generator = torch.Generator().manual_seed(0)
    lengths = [13, 4, 9, 6, 2, 11, 5]
    return from_sequences(
        [torch.randint(0, 37, (length,), generator=generator) for length in lengths],
        loss_masks=[torch.arange(length) >= 1 for length in lengths],
    )


def count_reductions(engine: FSDPEngine, *, max_tokens: int) -> int:
    """Count gradient reductions of one training call in torch's flight recorder."""
    packed = engine.shard_data(make_batch(), max_tokens=max_tokens)
    before = len(_recorded())
    with engine.train_mode():
        engine.forward_backward_batch(packed, forward_only=False)
    engine.optimizer_zero_grad()
    return sum("reduce" in name for name in _recorded()[before:])


def _recorded() -> list[str]:
    """Return the names of all collectives so far."""
    entries = json.loads(_dump_fr_trace_json(includeCollectives=True, onlyActive=False)).get(
        "entries", []
    )
    assert len(entries) < 2000, "the recorder keeps no more"
    return [
        entry["profiling_name"] for entry in sorted(entries, key=lambda entry: entry["record_id"])
    ]


def main(strategy: Strategy, fsdp_size: int | None, keeping: str, folder: Path) -> None:
    engine = FSDPEngine(
        FSDPConfig(
            model=ModelSpec(architecture=ARCHITECTURE),
            optimizer=OptimizerSpec(lr=1e-2),
            precision=PrecisionSpec(compute="fp32"),
            strategy=strategy,
            fsdp_size=fsdp_size,
            reshard_after_forward="keeps" not in keeping,
            wrap_together=2 if "together" in keeping else 1,
            device="cpu",
        )
    )
    engine.init_model()
    engine.set_loss_fn(NegativeLogprob())
    with engine.export_weights() as stream:
        first = list(stream)
    norms = []
    for update in range(4):
        if update == 3:
            # What was gathered for the next pass must not outlive this.
            with engine.export_weights() as stream:
                weights: dict[str, Tensor] = dict(stream)
            engine.load_weights(first)
        with engine.train_mode():
            engine.forward_backward_batch(
                engine.shard_data(make_batch(), max_tokens=24), forward_only=False
            )
        norms.append(engine.optimizer_step())
        engine.optimizer_zero_grad()
    reductions = [count_reductions(engine, max_tokens=max_tokens) for max_tokens in (64, 16)]
    topology = engine.topology
    torch.save(
        {"norms": norms, "weights": weights, "reductions": reductions},
        folder / f"rank-{topology.global_rank}-of-{topology.world_size}.pt",
    )
    engine.close()


if __name__ == "__main__":
    main(
        sys.argv[1],
        None if sys.argv[2] == "all" else int(sys.argv[2]),
        sys.argv[3],
        Path(sys.argv[4]),
    )  # type: ignore[arg-type]
