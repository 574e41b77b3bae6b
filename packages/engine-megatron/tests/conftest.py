"""Fixtures: a tiny seeded model, engines closed after each test, and rank processes."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from temper_engine_api.batch import SequenceBatch, from_sequences
from temper_engine_api.conformance.harness.rank_pool import RankPool
from temper_engine_api.conformance.oracle.oracle_cache import OracleCache
from temper_engine_api.specs import ModelSpec, OptimizerSpec, PrecisionSpec, Scalar
from temper_engine_megatron.config import MegatronConfig
from temper_engine_megatron.engine import MegatronEngine

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


@pytest.fixture(autouse=True)
def without_cuda(request: pytest.FixtureRequest) -> None:
    """Skip tests for the CPU if torch finds CUDA, which Megatron would use."""
    if torch.cuda.is_available() and request.node.get_closest_marker("gpu") is None:
        pytest.skip(
            "torch finds CUDA, and these tests are for the CPU: start with an empty "
            "CUDA_VISIBLE_DEVICES"
        )


@pytest.fixture
def config() -> MegatronConfig:
    return MegatronConfig(
        model=ModelSpec(architecture=ARCHITECTURE),
        optimizer=OptimizerSpec(lr=1e-2, clip_grad_norm=None),
        precision=PrecisionSpec(compute="fp32"),
        device="cpu",
    )


@pytest.fixture
def start(config: MegatronConfig) -> Iterator[Callable[..., MegatronEngine]]:
    """Start an engine with some settings replaced; all are closed in reverse order."""
    started: list[MegatronEngine] = []

    def _start(**changes: object) -> MegatronEngine:
        engine = MegatronEngine(replace(config, **changes))  # type: ignore[arg-type]
        engine.init_model()
        started.append(engine)
        return engine

    yield _start
    for engine in reversed(started):
        engine.close()


@pytest.fixture
def batch() -> SequenceBatch:
    """Draw four sequences of 5 to 14 tokens, of which the first four are the prompt."""
    generator = torch.Generator().manual_seed(11)
    lengths = [9, 5, 14, 7]
    return from_sequences(
        [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in lengths],
        loss_masks=[torch.arange(length) >= 4 for length in lengths],
        temperature=[1.0, 0.7, 1.3, 1.0],
    )


@pytest.fixture(scope="session")
def rank_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Start two rank processes."""
    rank_pool = RankPool(2, folder=tmp_path_factory.mktemp("rank_pool"))
    yield rank_pool
    rank_pool.close()


@pytest.fixture(scope="session")
def four_rank_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Start four rank processes, for nightly tests."""
    four_rank_pool = RankPool(4, folder=tmp_path_factory.mktemp("four_rank_pool"))
    yield four_rank_pool
    four_rank_pool.close()


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> OracleCache:
    """Create the conformance kit's oracle, with its models and batches."""
    folder: Path = tmp_path_factory.mktemp("models")
    return OracleCache(folder=folder)
