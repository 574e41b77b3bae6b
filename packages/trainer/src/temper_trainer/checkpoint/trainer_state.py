"""The trainer's own part in a checkpoint.

Every random choice is a function of (run.seed, purpose, step, index), so counters are enough to
continue: there is no random state to save.
"""

import json
from dataclasses import asdict, dataclass, fields

from temper_engine_api.errors import DamagedCheckpointError
from temper_trainer.types import DataCursor


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """State of the trainer after a completed step.

    Example:
        >>> state = TrainerState(
        ...     phase="rl",
        ...     step=20,
        ...     cursor=DataCursor(epoch=0, index=640),
        ...     weight_version=20,
        ...     config_digest="ab12",
        ... )
        >>> TrainerState.from_json(state.to_json()) == state
        True
    """

    phase: str
    """Phase whose steps are counted, such as ``rl``, ``sft`` or ``warm_start``."""
    step: int
    """Number of completed steps in the phase."""
    cursor: DataCursor
    """Position in the training data."""
    trained_ahead: tuple[int, ...] = ()
    """Prompts from the cursor on that are trained already, counted from it; loop ``async`` only."""
    weight_version: int
    """Version of the weights that were last sent to the sampler."""
    config_digest: str
    """Digest of the run's configuration."""
    kl_coef: float = 0.0
    """Current coefficient of the KL penalty on rewards."""
    entropy_coef: float = 0.0
    """Current coefficient of the entropy bonus."""
    entropy_bonus_active: bool = True
    """False if the last step's entropy was above its target, where the bonus is not applied."""
    reward_count: float = 0.0
    """Number of rewards in the run so far."""
    reward_mean: float = 0.0
    """Mean of these rewards."""
    reward_squares: float = 0.0
    """Sum of their squared deviations from the mean."""
    tokenizer_digest: str | None = None
    """Digest of the tokenizer that the weights were trained with; None in older checkpoints."""

    def to_json(self) -> str:
        """Return the content of the state file."""
        return json.dumps(asdict(self), indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> "TrainerState":
        """Parse the content of a state file.

        Raises:
            DamagedCheckpointError: If it is not JSON, or a field is missing, unknown, or of another
                type.
        """
        # Checked field by field: a file of another version must not be read with default values.
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):  # not JSON, not UTF-8, or nested too deep
            values = None
        if isinstance(values, dict):
            # Fields that files of older versions lack.
            values = {
                "tokenizer_digest": None,
                "entropy_bonus_active": True,
                "trained_ahead": [],
                **values,
            }
        match values:
            case {
                "phase": str(),
                "step": int(),
                "cursor": {"epoch": int(epoch), "index": int(index)},
                "weight_version": int(),
                "trained_ahead": list(trained_ahead),
            } if (
                values.keys() == {item.name for item in fields(cls)}
                and isinstance(values["config_digest"], str)
                and isinstance(values["tokenizer_digest"], str | None)
                and isinstance(values["entropy_bonus_active"], bool)
                and all(isinstance(values[name], float) for name in _FLOAT_FIELDS)
                and all(isinstance(each, int) for each in trained_ahead)
            ):
                return cls(
                    **{
                        **values,
                        "cursor": DataCursor(epoch=epoch, index=index),
                        "trained_ahead": tuple(trained_ahead),
                    }
                )
        raise DamagedCheckpointError(
            f"the trainer's state has unexpected fields: {text[:200]!r}. Resume from another step."
        )


_FLOAT_FIELDS = tuple(item.name for item in fields(TrainerState) if item.type is float)
