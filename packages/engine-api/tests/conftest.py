"""Test batches, and a small engine: a bigram table, with ranks as threads."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
import torch
from hypothesis import settings
from torch import Tensor

from temper_engine_api.batch import PackedBatch, SequenceBatch, from_sequences
from temper_engine_api.capabilities import Capability
from temper_engine_api.distributed.gather_codec import decode_value, encode_value
from temper_engine_api.engine import BaseEngine
from temper_engine_api.objective import Aggregation, HeadOutput, HeadOutputs, LossTerms, Objective
from temper_engine_api.specs import EngineConfig, ModelSpec, OptimizerSpec, ScheduleSpec
from temper_engine_api.topology import Axis, Topology
from temper_engine_api.weights import NamedWeight, TrainingState, WeightEntry, check_weight_entries

# No deadline: on a machine that is busy with other tests, a slow example is no failure.
settings.register_profile("temper", deadline=None)
settings.load_profile("temper")

VOCAB = 11
T = TypeVar("T")


class RankThreads:
    """Runs ranks as threads of one process, and gathers values among them."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._slots: list[Any] = [None] * num_ranks
        self._barrier = threading.Barrier(num_ranks, timeout=20)

    def gather(self, rank: int, item: T) -> list[T]:
        # Encoded as between processes, so that a value that cannot be gathered fails here too.
        self._slots[rank] = encode_value(item)
        self._barrier.wait()
        everything = [decode_value(message) for message in self._slots]
        self._barrier.wait()
        return everything

    def run(self, action: Callable[[int], T]) -> list[T]:
        """Run an action on every rank; return the results, or raise the first rank's error."""
        with ThreadPoolExecutor(self.num_ranks) as pool:
            return [
                future.result()
                for future in [pool.submit(action, rank) for rank in range(self.num_ranks)]
            ]


@dataclass(frozen=True, slots=True, kw_only=True)
class BigramConfig(EngineConfig):
    model: ModelSpec = field(
        default_factory=lambda: ModelSpec(architecture={"model_type": "bigram"})
    )


class BigramEngine(BaseEngine):
    """Bigram model: log p(t | previous token) is a row of one table, trained with AdamW.

    Gradients are summed over ranks, which are threads of this process.
    """

    config_class = BigramConfig
    capabilities: ClassVar = frozenset(
        {Capability.LANGUAGE_MODEL, Capability.DATA_PARALLEL, Capability.PORTABLE_STATE}
    )

    def __init__(
        self, config: EngineConfig, *, rank_threads: RankThreads | None = None, rank: int = 0
    ) -> None:
        super().__init__(config)
        self.rank_threads = rank_threads or RankThreads(1)
        self.rank = rank
        self.mode_events: list[str] = []

    def _build(self) -> Topology:
        start = torch.randn(
            VOCAB, VOCAB, generator=torch.Generator().manual_seed(self.config.model.seed)
        )
        self.table = torch.nn.Parameter(start)
        self.optimizer = torch.optim.AdamW([self.table], weight_decay=0.0)
        size = self.rank_threads.num_ranks
        return Topology(world_size=size, global_rank=self.rank, dp=Axis(size=size, rank=self.rank))

    def _run_micro_batches(
        self,
        batch: PackedBatch,
        *,
        requested_outputs,
        micro_batch_loss,
        forward_only,
        reduce_gradients,
    ) -> list[HeadOutputs]:  # type: ignore[no-untyped-def]
        outputs = []
        for micro in batch.iterate_micro_batches():
            with torch.set_grad_enabled(not forward_only):
                head_outputs = HeadOutputs(
                    columns={
                        head_output: self._compute_outputs(head_output, micro)
                        for head_output in requested_outputs
                    }
                )
                if micro_batch_loss is not None:
                    loss = micro_batch_loss(head_outputs, micro)
                    if not forward_only:
                        loss.backward()
            outputs.append(head_outputs.detach())
        if reduce_gradients:
            self._reduce_pending_gradients()
        return outputs

    def _compute_outputs(self, head_output: HeadOutput, micro: SequenceBatch) -> Tensor:
        assert head_output is HeadOutput.LOGPROB
        logits = self.table[micro.tokens.roll(1)] / micro.temperature[micro.sequence_index][:, None]
        picked = logits.log_softmax(-1).gather(1, micro.tokens[:, None])[:, 0]
        first = torch.zeros_like(micro.loss_mask).index_fill(
            0, micro.sequence_starts.long()[:-1], True
        )
        return picked.masked_fill(first, 0.0)

    def _reduce_pending_gradients(self) -> None:
        assert self.table.grad is not None
        self.table.grad = torch.stack(self._gather_objects(self.table.grad.clone())).sum(0)

    def _apply_gradients(self, *, lr: float) -> float:
        assert self.config.optimizer is not None
        norm = float(
            torch.nn.utils.clip_grad_norm_(
                [self.table], self.config.optimizer.clip_grad_norm or float("inf")
            )
        )
        self.optimizer.param_groups[0]["lr"] = lr
        if torch.isfinite(torch.tensor(norm)):
            self.optimizer.step()
        return norm

    def _zero_gradients(self) -> None:
        self.table.grad = None

    @contextmanager
    def _loaded(self, mode: str) -> Iterator[None]:
        self.mode_events.append(f"in {mode}")
        try:
            yield
        finally:
            self.mode_events.append(f"out {mode}")

    def _iterate_weights(self) -> Iterator[NamedWeight]:
        yield NamedWeight("table", self.table.detach().clone())

    def _load_weights(self, stream: Iterable[NamedWeight]) -> None:
        arrived = list(stream)
        entries = [
            WeightEntry(name=w.name, shape=tuple(w.tensor.shape), dtype=w.tensor.dtype)
            for w in arrived
        ]
        check_weight_entries(
            [WeightEntry(name="table", shape=(VOCAB, VOCAB), dtype=torch.float32)], entries
        )
        self.table.data.copy_(arrived[0].tensor)

    def _iterate_state(self) -> Iterator[TrainingState]:
        state = self.optimizer.state.get(self.table, {})
        zeros = torch.zeros_like(self.table)
        yield TrainingState(
            name="table",
            master=self.table.detach().clone(),
            first_moment=state.get("exp_avg", zeros).clone(),
            second_moment=state.get("exp_avg_sq", zeros).clone(),
            update_count=int(state.get("step", 0)),
        )

    def _load_state(self, stream: Iterable[TrainingState]) -> None:
        (state,) = stream
        self.table.data.copy_(state.master)
        moments = {"exp_avg": state.first_moment, "exp_avg_sq": state.second_moment}
        self.optimizer.state[self.table] = {
            "step": torch.tensor(float(state.update_count)),
            **moments,
        }

    def _write_state(self, directory: str) -> list[str]:
        name = f"rank_{self.rank}.pt"
        torch.save(
            {"table": self.table.detach(), "optimizer": self.optimizer.state_dict()},
            Path(directory) / name,
        )
        return [name]

    def _read_state(self, directory: str) -> None:
        saved = torch.load(Path(directory) / "rank_0.pt", weights_only=True)
        self.table.data.copy_(saved["table"])
        self.optimizer.load_state_dict(saved["optimizer"])

    def _sum_over_data_parallel(self, value: Tensor) -> Tensor:
        return torch.stack(self._gather_objects(value)).sum(0)

    def _gather_objects(self, item: T) -> list[T]:
        return self.rank_threads.gather(self.rank, item)

    def to(self, device: str, *, model: bool = True, optimizer: bool = True) -> None:
        return None

    def close(self) -> None:
        del self.table, self.optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedLogprob(Objective):
    """Loss -advantage * logprob of each token; a small objective that reads a column."""

    name: ClassVar[str] = "weighted_logprob"
    aggregation: Aggregation = field(default_factory=Aggregation)

    @property
    def required_outputs(self) -> frozenset[HeadOutput]:
        return frozenset({HeadOutput.LOGPROB})

    @property
    def columns(self) -> frozenset[str]:
        return frozenset({"advantages"})

    def __call__(self, head_outputs: HeadOutputs, batch: SequenceBatch) -> LossTerms:
        return LossTerms(loss=-batch.columns["advantages"] * head_outputs[HeadOutput.LOGPROB])


def make_batch(lengths: Sequence[int], *, seed: int = 0, **ids: Sequence[int]) -> SequenceBatch:
    """Make a batch of random tokens with random loss masks and advantages."""
    draw = torch.Generator().manual_seed(seed)
    masks = [torch.rand(n, generator=draw) < 0.7 for n in lengths]
    for mask in masks:
        mask[0] = False
    return from_sequences(
        [torch.randint(VOCAB, (n,), generator=draw) for n in lengths],
        loss_masks=masks,
        columns={"advantages": [torch.randn(n, generator=draw) for n in lengths]},
        sequence_columns={"scores": torch.randn(len(lengths), generator=draw)},
        **ids,
    )


@pytest.fixture(name="make_batch", scope="session")
def make_batch_fixture() -> Callable[..., SequenceBatch]:
    return make_batch


@pytest.fixture(scope="session")
def objective() -> Objective:
    return WeightedLogprob()


@pytest.fixture(scope="session")
def make_engines() -> Callable[..., list[BigramEngine]]:
    """Return a function that builds the initialized engines of `num_ranks` ranks."""

    def make(
        num_ranks: int = 1,
        *,
        lr: float = 0.1,
        schedule: ScheduleSpec | None = None,
        **settings: Any,
    ) -> list[BigramEngine]:
        rank_threads = RankThreads(num_ranks)
        settings.setdefault(
            "optimizer", OptimizerSpec(lr=lr, clip_grad_norm=None, max_consecutive_skips=2)
        )
        config = BigramConfig(schedule=schedule or ScheduleSpec(), **settings)
        engines = [
            BigramEngine(config, rank_threads=rank_threads, rank=rank) for rank in range(num_ranks)
        ]
        for engine in engines:
            engine.init_model()
            engine.set_loss_fn(WeightedLogprob())
        return engines

    return make


@pytest.fixture
def engine(make_engines: Callable[..., list[BigramEngine]]) -> BigramEngine:
    """Return an initialized engine with a single rank."""
    (single,) = make_engines()
    return single
