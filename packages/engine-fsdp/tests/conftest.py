"""Fixtures: a tiny seeded model config, engines that are closed after each test, and a batch."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import settings

from temper_engine_api.batch import SequenceBatch, from_sequences
from temper_engine_api.conformance.harness.rank_pool import RankPool
from temper_engine_api.specs import ModelSpec, OptimizerSpec, PrecisionSpec, Scalar
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.engine import FSDPEngine

# Shared machines make wall time noise, and a pull request's result must depend on its code alone.
settings.register_profile("engine-fsdp", deadline=None, derandomize=True)
settings.load_profile("engine-fsdp")

VOCABULARY = 61
ARCHITECTURE: Mapping[str, Scalar] = {
    "model_type": "qwen2",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@pytest.fixture
def config() -> FSDPConfig:
    return FSDPConfig(
        model=ModelSpec(architecture=ARCHITECTURE),
        optimizer=OptimizerSpec(lr=1e-2, clip_grad_norm=None),
        precision=PrecisionSpec(compute="fp32"),
        device="cpu",
    )


@pytest.fixture
def start(config: FSDPConfig) -> Iterator[Callable[..., FSDPEngine]]:
    """Start an engine with changed settings; engines are closed in reverse order."""
    started: list[FSDPEngine] = []

    def _start(**changes: object) -> FSDPEngine:
        engine = FSDPEngine(replace(config, **changes))  # type: ignore[arg-type]
        engine.init_model()
        started.append(engine)
        return engine

    yield _start
    for engine in reversed(started):
        engine.close()


@pytest.fixture
def batch() -> SequenceBatch:
    """Six sequences of 5 to 14 tokens, the first four of each a prompt."""
    generator = torch.Generator().manual_seed(11)
    lengths = [9, 5, 14, 7, 12, 6]
    return from_sequences(
        [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in lengths],
        loss_masks=[torch.arange(length) >= 4 for length in lengths],
        temperature=[1.0, 0.7, 1.3, 1.0, 1.0, 0.9],
    )


@pytest.fixture(scope="module")
def rank_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Two rank processes, forked from processes that all modules share."""
    rank_pool = RankPool(2, folder=tmp_path_factory.mktemp("rank_pool"))
    yield rank_pool
    rank_pool.close()
