"""Sizes and ranks of the parallel axes, and the engine's constraints on plans."""

from dataclasses import dataclass, field

from temper_engine_api.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Size of one parallel axis and this process's rank on it."""

    size: int = 1
    """Number of ranks along this axis."""
    rank: int = 0
    """Rank in [0, size)."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(
                f"the rank on an axis is {self.rank}, but must be in [0, {self.size})."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConstraints:
    """An engine's requirements for the split into micro-batches.

    Example:
        An engine with four pipeline stages and sequence parallelism over two ranks:

        >>> constraints = PlanConstraints(min_micro_batches=4, token_multiple=2)
        >>> constraints.micro_batch_multiple
        1
    """

    micro_batch_multiple: int = 1
    """The micro-batch count per rank must be a multiple of this (interleaved pipeline)."""
    min_micro_batches: int = 1
    """Smallest number of micro-batches per rank that the pipeline schedule accepts."""
    token_multiple: int = 1
    """The engine pads each micro-batch's tokens to a multiple of this (context and sequence
    parallel); the token cap includes the padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Sizes and ranks of the parallel axes, known after `init_model`.

    Example:
        >>> topology = Topology(
        ...     world_size=4, global_rank=3, dp=Axis(size=2, rank=1), tp=Axis(size=2, rank=1),
        ...     returns_outputs=False,
        ... )
        >>> topology.dp.rank, topology.pp.size
        (1, 1)
    """

    world_size: int = 1
    """Number of processes in this engine."""
    global_rank: int = 0
    """Rank of this process, in [0, world_size)."""
    dp: Axis = field(default_factory=Axis)
    """Data parallel: ranks with different samples."""
    tp: Axis = field(default_factory=Axis)
    """Tensor-parallel size and this rank's index."""
    pp: Axis = field(default_factory=Axis)
    """Pipeline-parallel size and this rank's stage."""
    cp: Axis = field(default_factory=Axis)
    """Context-parallel size and this rank's index."""
    ep: Axis = field(default_factory=Axis)
    """Expert parallel; may overlap other axes."""
    sp: Axis = field(default_factory=Axis)
    """Ulysses sequence-parallel size and this rank's index."""
    returns_outputs: bool = True
    """True on exactly one rank of each model replica."""
    plan_constraints: PlanConstraints = field(default_factory=PlanConstraints)
