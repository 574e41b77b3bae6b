"""What the trainer itself must remember. Everything random is a pure function of (run.seed, step, ...), so counters are enough."""

import json
from dataclasses import asdict, dataclass

from temper_engine_api.errors import DamagedCheckpointError
from temper_trainer.types import DataCursor


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """The trainer's part of a checkpoint."""

    phase: str
    """rl, sft or warm_start: steps of one are no steps of another."""
    step: int
    """Completed steps of the phase."""
    cursor: DataCursor
    """Where in the training data."""
    weight_version: int
    """Last published set of weights."""
    config_digest: str
    """Of the configuration that made it."""
    kl_coef: float = 0.0
    """Weight of the KL penalty on rewards, which a controller may move."""

    def to_json(self) -> str:
        """As it is written."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "TrainerState":
        """As it was written.

        Raises:
            DamagedCheckpointError: a field is missing or of another type.
        """
        values = json.loads(text)
        match values:
            case {
                "phase": str(phase),
                "step": int(step),
                "cursor": {"epoch": int(epoch), "index": int(index)},
                "weight_version": int(version),
                "config_digest": str(digest),
                "kl_coef": float(kl_coef),
            }:
                cursor = DataCursor(epoch=epoch, index=index)
                return cls(phase=phase, step=step, cursor=cursor, weight_version=version, config_digest=digest, kl_coef=kl_coef)
        raise DamagedCheckpointError(f"the trainer's state has unexpected fields: {text[:200]!r}. Resume from another step.")
