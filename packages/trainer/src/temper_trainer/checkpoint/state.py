"""What the trainer itself must remember. Everything random is a pure function of (run.seed, step, ...), so counters are enough."""

import json
from dataclasses import asdict, dataclass, fields

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
    entropy_coef: float = 0.0
    """Weight of the entropy bonus, which a controller may move."""
    reward_count: float = 0.0
    """Rewards of the run so far, ..."""
    reward_mean: float = 0.0
    """... their mean, ..."""
    reward_squares: float = 0.0
    """... and the sum of their squared distances from it."""

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
                "phase": str(),
                "step": int(),
                "cursor": {"epoch": int(epoch), "index": int(index)},
                "weight_version": int(),
            } if (
                values.keys() == {item.name for item in fields(cls)}
                and isinstance(values["config_digest"], str)
                and all(isinstance(values[name], float) for name in _NUMBERS)
            ):
                return cls(**{**values, "cursor": DataCursor(epoch=epoch, index=index)})
        raise DamagedCheckpointError(
            f"the trainer's state has unexpected fields: {text[:200]!r}. Resume from another step."
        )


_NUMBERS = ("kl_coef", "entropy_coef", "reward_count", "reward_mean", "reward_squares")
