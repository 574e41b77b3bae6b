"""Split an old batch into mini-batches of consecutive rows, and these into micro-batches.

By row counts, or by tokens with the largest differencing method.

Source of the method: Karmarkar and Karp 1982, "The Differencing Method of Set Partitioning"; for k
sets: Korf 2009, section 3.
"""

import dataclasses
import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from temper_engine_api.engine import BaseEngine
from temper_engine_api.errors import BatchError, ConfigError
from temper_engine_api.specs import ScheduleSpec
from temper_legacy_shim.data_proto import DataProto
from temper_legacy_shim.workers.batches.rows import row_lengths

QUADRATIC_FROM = 24576
"""Tokens at which the quadratic part of a row's cost equals its linear part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitSettings:
    """Sizes per rank, as the old workers had them after dividing by the number of ranks."""

    ppo_mini_batch_size: int
    """Rows of an update on this rank."""
    ppo_micro_batch_size_per_gpu: int | None = None
    """Rows of a micro-batch; required unless use_dynamic_bsz is set."""
    use_dynamic_bsz: bool = False
    """Cut micro-batches by tokens."""
    ppo_max_token_len_per_gpu: int = 16384
    """Tokens from which their number follows."""
    ppo_epochs: int = 1
    """Passes over the batch."""
    ulysses_sequence_parallel_size: int = 1
    """Ranks that share a sequence; each adds a token budget."""
    micro_batch_multiple: int = 1
    """Divisor of the number of dynamic micro-batches."""

    def __post_init__(self) -> None:
        if not self.use_dynamic_bsz and not self.ppo_micro_batch_size_per_gpu:
            raise ConfigError(
                "ppo_micro_batch_size_per_gpu is not set: give it, or set use_dynamic_bsz with "
                "ppo_max_token_len_per_gpu."
            )
        if min(self.ppo_mini_batch_size, self.ppo_epochs, self.ppo_max_token_len_per_gpu) < 1:
            raise ConfigError(
                "ppo_mini_batch_size, ppo_epochs and ppo_max_token_len_per_gpu must be at least "
                f"1, but are in {self}."
            )

    def micro_batches(self, mini_batch: DataProto) -> list[list[int]]:
        if self.use_dynamic_bsz:
            budget = self.ppo_max_token_len_per_gpu * self.ulysses_sequence_parallel_size
            return rows_by_tokens(
                row_lengths(mini_batch), max_tokens=budget, multiple=self.micro_batch_multiple
            )
        assert self.ppo_micro_batch_size_per_gpu is not None
        return rows_by_count(len(mini_batch), size=self.ppo_micro_batch_size_per_gpu)

    def scale(self, num_rows: int) -> float:
        """Return a micro-batch's share of the nominal mini-batch, even if that was cut."""
        if self.use_dynamic_bsz:
            # The old workers divided by the nominal size, also for a shorter last mini-batch.
            return num_rows / self.ppo_mini_batch_size
        assert self.ppo_micro_batch_size_per_gpu is not None
        return 1 / max(1, self.ppo_mini_batch_size // self.ppo_micro_batch_size_per_gpu)


def mini_batches(data: DataProto, *, split: SplitSettings, engine: BaseEngine) -> list[DataProto]:
    """Split the batch into consecutive rows, a mini-batch for each update.

    Raises:
        BatchError: ranks would make different numbers of updates and wait for each other for ever.
    """
    # Consecutive rows: the old workers did not shuffle by default (ActorConfig.shuffle).
    parts = data.split(split.ppo_mini_batch_size)
    counts = engine.gather_objects(len(parts))
    if len(set(counts)) != 1 or not parts:
        raise BatchError(
            f"ranks hold batches for {counts} updates of {split.ppo_mini_batch_size} rows: give "
            "each rank the same number of rows, at "
            "least one, for example with pad_dataproto_to_divisor."
        )
    return parts


def matched(micro_batches: Sequence[list[int]], *, engine: BaseEngine) -> list[list[int]]:
    """Return the micro-batches, with empty ones if another rank has more."""
    # Passes are collective.
    most = max(engine.gather_objects(len(micro_batches)))
    return [*micro_batches, *([] for _ in range(most - len(micro_batches)))]


def scheduled(micro_batches: Sequence[list[int]], *, engine: BaseEngine) -> list[list[int]]:
    """Pad micro-batches as ``matched`` does, to a number the engine's schedule accepts."""
    result, constraints = matched(micro_batches, engine=engine), engine.topology.plan_constraints
    expected = max(len(result), constraints.min_micro_batches)
    # Interleaved pipelines need a multiple of their stages.
    expected += -expected % constraints.micro_batch_multiple
    return [*result, *([] for _ in range(expected - len(result)))]


def append_metrics(metrics: dict[str, object], result: Mapping[str, float]) -> None:
    """Add one entry to each metric's list, as the old workers reported them."""
    for name, value in result.items():
        entries = metrics.setdefault(name, [])
        assert isinstance(entries, list)
        entries.append(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class OldSchedule:
    """The old learning rates: a pure function of completed scheduler steps."""

    lr: float
    lr_warmup_steps: int = -1
    """Steps of linear rise; negative takes the ratio."""
    lr_warmup_steps_ratio: float = 0.0
    total_training_steps: int = -1
    """End of a cosine."""
    lr_scheduler_type: str = "constant"
    min_lr_ratio: float | None = None
    """Floor of a cosine, as a share of the peak."""
    num_cycles: float = 0.5
    """Half a wave ends at the floor."""
    zero_indexed_step: bool = True
    """True if the first warm-up step has rate 0, as in the old workers."""

    def __post_init__(self) -> None:
        if self.lr_scheduler_type not in ("constant", "cosine"):
            raise ConfigError(
                f"optim.lr_scheduler_type is {self.lr_scheduler_type!r}, but must be constant or "
                "cosine."
            )
        if self.lr_scheduler_type == "cosine" and self.total_training_steps < 1:
            raise ConfigError(
                "optim.lr_scheduler_type is cosine, which needs optim.total_training_steps: the "
                "length of the fall."
            )

    @property
    def warmup(self) -> int:
        """Steps of linear rise."""
        if self.lr_warmup_steps >= 0:
            return self.lr_warmup_steps
        return int(self.lr_warmup_steps_ratio * max(self.total_training_steps, 0))

    def rate(self, step: int) -> float:
        """Return the rate of the update after ``step`` scheduler steps."""
        # The first update of a warm-up has rate 0 with a zero-indexed step.
        at = step if self.zero_indexed_step else step + 1
        if at < self.warmup:
            return self.lr * at / max(1, self.warmup)
        if self.lr_scheduler_type == "constant":
            return self.lr
        progress = (at - self.warmup) / max(1, self.total_training_steps - self.warmup)
        floor = self.min_lr_ratio or 0.0
        wave = math.cos(2.0 * math.pi * self.num_cycles * progress)
        return self.lr * max(floor, 0.5 * (1.0 - floor) * wave + 0.5 * (1.0 + floor))


def set_rate(engine: BaseEngine, lr: float) -> None:
    """Set the rate of the next update; the engine's own schedule is constant."""
    assert engine.config.optimizer is not None
    # Configurations are frozen, and the engine reads the rate at each optimizer step.
    engine.config = dataclasses.replace(
        engine.config, optimizer=dataclasses.replace(engine.config.optimizer, lr=lr)
    )


def passes(
    data: DataProto, *, split: SplitSettings, engine: BaseEngine
) -> Iterator[tuple[DataProto, bool]]:
    """Yield every mini-batch of every pass, and whether it is the only one of the call."""
    parts = mini_batches(data, split=split, engine=engine)
    for _ in range(split.ppo_epochs):
        for part in parts:
            yield part, len(parts) == 1 and split.ppo_epochs == 1


_MEGATRON_STYLES = ("constant", "linear", "cosine", "inverse-square-root")


@dataclass(frozen=True, slots=True, kw_only=True)
class OldMegatronSchedule:
    """Megatron's schedule as a function of completed steps, with the old YAML's defaults."""

    lr: float
    lr_warmup_init: float = 0.0
    """Rate of the first warm-up step."""
    lr_warmup_steps: int = -1
    """Steps of linear rise; 0 and less take the ratio."""
    lr_warmup_steps_ratio: float = 0.0
    """Fraction of the decay's steps."""
    lr_decay_steps: int | None = None
    """End of the decay; None is total_training_steps."""
    total_training_steps: int = -1
    lr_decay_style: str = "constant"
    """constant, linear, cosine or inverse-square-root."""
    min_lr: float = 0.0

    def __post_init__(self) -> None:
        if self.lr_decay_style not in _MEGATRON_STYLES:
            raise ConfigError(
                f"optim.lr_decay_style is {self.lr_decay_style!r}, but must be one of "
                f"{', '.join(_MEGATRON_STYLES)}."
            )
        if self.lr_decay_style in ("linear", "cosine") and self.end <= self.warmup:
            raise ConfigError(
                f"optim.lr_decay_style is {self.lr_decay_style}, which ends after {self.end} steps "
                f"and begins after {self.warmup}: set "
                "optim.lr_decay_steps or optim.total_training_steps."
            )

    @property
    def end(self) -> int:
        """Steps until the decay ends."""
        return self.total_training_steps if self.lr_decay_steps is None else self.lr_decay_steps

    @property
    def warmup(self) -> int:
        """Steps of linear rise."""
        if self.lr_warmup_steps > 0:
            return self.lr_warmup_steps
        return max(0, int(self.lr_warmup_steps_ratio * self.end))

    def rate(self, step: int) -> float:
        """Return the rate of the updates after ``step`` scheduler steps."""
        # The last step of the warm-up is included, as in OptimizerParamScheduler.get_lr of
        # Megatron.
        if self.warmup > 0 and step <= self.warmup:
            return self.lr_warmup_init + (self.lr - self.lr_warmup_init) * step / self.warmup
        if self.lr_decay_style == "constant":
            return self.lr
        if step > self.end:
            return self.min_lr
        if self.lr_decay_style == "inverse-square-root":
            return max(self.min_lr, self.lr * math.sqrt(max(self.warmup, 1) / max(step, 1)))
        progress = (step - self.warmup) / (self.end - self.warmup)
        fraction = (
            1.0 - progress
            if self.lr_decay_style == "linear"
            else 0.5 * (math.cos(math.pi * progress) + 1.0)
        )
        return self.min_lr + fraction * (self.lr - self.min_lr)

    def as_spec(self) -> ScheduleSpec:
        """Return Temper's own schedule of the same shape.

        Raises:
            ConfigError: it has none.
        """
        if self.lr_warmup_init or self.lr_decay_style == "inverse-square-root":
            raise ConfigError(
                f"optim has lr_warmup_init {self.lr_warmup_init} and lr_decay_style "
                f"{self.lr_decay_style}, which numerics temper lacks: "
                "use a rise from 0 to a constant, linear or cosine rate, or numerics legacy."
            )
        if self.lr_decay_style == "constant":
            return ScheduleSpec(warmup_steps=self.warmup, advance="rl_step")
        return ScheduleSpec(
            kind="linear" if self.lr_decay_style == "linear" else "cosine",
            warmup_steps=self.warmup,
            total_steps=self.end,
            min_lr_ratio=self.min_lr / self.lr,
            advance="rl_step",
        )


@dataclass(frozen=True, slots=True, order=True)
class _Part:
    """A set of rows and its cost, ordered as in the old code."""

    cost: int
    count: int
    rows: tuple[tuple[int, int], ...]

    def joined(self, other: "_Part") -> "_Part":
        return _Part(self.cost + other.cost, self.count + other.count, self.rows + other.rows)


class _Split:
    """k parts, the most expensive first; the widest spread comes first off a heap."""

    def __init__(self, parts: list[_Part]) -> None:
        self.parts = sorted(parts, reverse=True)
        self.spread = self.parts[0].cost - self.parts[-1].cost

    def __lt__(self, other: "_Split") -> bool:
        return (self.spread, self.parts[0]) > (other.spread, other.parts[0])

    def joined(self, other: "_Split") -> "_Split":
        return _Split(
            [
                own.joined(others)
                for own, others in zip(self.parts, reversed(other.parts), strict=True)
            ]
        )


def rows_by_count(num_rows: int, *, size: int) -> list[list[int]]:
    """Split indices into consecutive pieces of ``size``; the last may be shorter."""
    return [list(range(first, min(first + size, num_rows))) for first in range(0, num_rows, size)]


def rows_by_tokens(
    lengths: Sequence[int], *, max_tokens: int, multiple: int = 1
) -> list[list[int]]:
    """Balance the cost of micro-batches, and return the rows of each.

    ``max_tokens`` decides the number, and is no hard cap.

    The number is raised to a multiple of ``multiple``, as interleaved pipelines want it.

    The most expensive micro-batches come in the middle, the cheapest at both ends.
    """
    # rearrange_micro_batches() of verl takes ceildiv(tokens, max_tokens), and balances rows over
    # that many.
    number = min(len(lengths), -(-sum(lengths) // max_tokens))
    number += -number % multiple
    # calculate_workload() of verl, fitted to the FLOPs of a 7B model.
    costs = [QUADRATIC_FROM * n + n * n for n in lengths]
    parts = [sorted(row for row, _ in part.rows) for part in _even_split(costs, number).parts]
    parts.sort(
        key=lambda rows: (sum(costs[row] for row in rows), rows[0] if rows else 0), reverse=True
    )
    # A pipeline idles while it fills and drains, which takes less time with cheap micro-batches.
    return parts[::2][::-1] + parts[1::2]


def _even_split(costs: Sequence[int], number: int) -> _Split:
    empty = _Part(0, 0, ())
    heap: list[_Split] = []
    for cost, row in sorted((cost, row) for row, cost in enumerate(costs)):
        heapq.heappush(heap, _Split([_Part(cost, 1, ((row, cost),)), *[empty] * (number - 1)]))
    while len(heap) > 1:
        widest, next_one = heapq.heappop(heap), heapq.heappop(heap)
        heapq.heappush(heap, widest.joined(next_one))
    return heap[0]
