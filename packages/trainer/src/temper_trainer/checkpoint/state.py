"""What the trainer itself must remember. Everything random is a pure function of (run.seed, step, ...), so counters are enough."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from temper_engine_api.errors import DamagedCheckpointError
from temper_trainer.types import DataCursor


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """The trainer's part of a checkpoint."""

    step: int
    """Completed steps."""
    cursor: DataCursor
    """Where in the training data."""
    weight_version: int
    """Last published set of weights."""
    config_digest: str
    """Of the configuration that made it."""
    totals: Mapping[str, float] = field(default_factory=dict)
    """Running totals (prompts, tokens, failed rewards, skipped updates)."""

    def to_json(self) -> dict[str, object]:
        """As it is written."""
        return {**asdict(self), "totals": dict(self.totals)}

    @classmethod
    def from_json(cls, values: Mapping[str, object]) -> "TrainerState":
        """As it was written.

        Raises:
            DamagedCheckpointError: a field is missing or of another type.
        """
        match values:
            case {
                "step": int(step),
                "cursor": {"epoch": int(epoch), "index": int(index)},
                "weight_version": int(version),
                "config_digest": str(digest),
                "totals": dict(totals),
            }:
                cursor = DataCursor(epoch=epoch, index=index)
                return cls(step=step, cursor=cursor, weight_version=version, config_digest=digest, totals=totals)
        raise DamagedCheckpointError(f"the trainer's state has unexpected fields: {sorted(values)}.")
