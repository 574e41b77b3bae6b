"""Where this rank stands: sizes and ranks of every axis as integers, and what the engine asks of a plan."""

from dataclasses import dataclass, field

from temper_engine_api.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Size of one axis of parallelism and this rank's place on it."""

    size: int = 1
    """Ranks along this axis."""
    rank: int = 0
    """This rank's place, in [0, size)."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"axis rank {self.rank} is outside [0, {self.size}).")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConstraints:
    """What an engine's layout asks of the split into micro-batches."""

    micro_batch_multiple: int = 1
    """The number of micro-batches per rank must be a multiple of this (virtual pipelining)."""
    min_micro_batches: int = 1
    """Fewest micro-batches a schedule accepts."""
    token_multiple: int = 1
    """Tokens of a micro-batch are padded inside the engine to a multiple of this (context and sequence parallel); the cap counts them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Sizes and ranks of the axes, known after ``init_model``. Dispatch of data is derived from it."""

    world_size: int = 1
    """Processes of this engine."""
    global_rank: int = 0
    """This process among them."""
    dp: Axis = field(default_factory=Axis)
    """Data parallel: ranks that see different samples."""
    tp: Axis = field(default_factory=Axis)
    """Tensor parallel."""
    pp: Axis = field(default_factory=Axis)
    """Pipeline parallel."""
    cp: Axis = field(default_factory=Axis)
    """Context parallel."""
    ep: Axis = field(default_factory=Axis)
    """Expert parallel; it may overlap other axes."""
    sp: Axis = field(default_factory=Axis)
    """Sequence parallel (Ulysses)."""
    returns_outputs: bool = True
    """Exactly one rank of each model replica returns outputs."""
    plan_constraints: PlanConstraints = field(default_factory=PlanConstraints)
    """What a plan for this engine must satisfy."""
