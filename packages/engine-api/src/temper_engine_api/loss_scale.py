"""Dynamic loss scale for fp16: halved after an overflow, doubled after updates without one."""

from collections.abc import Mapping

from temper_engine_api.errors import DamagedCheckpointError
from temper_engine_api.specs import PrecisionSpec

INITIAL = 65536.0
GROWTH_INTERVAL = 2000


class LossScale:
    """Dynamic loss scale; always 1 unless the compute dtype is fp16.

    It is the same on every rank without communication, because it depends only on the global
    gradient norm.
    """

    def __init__(self, precision: PrecisionSpec) -> None:
        self.is_enabled = precision.compute == "fp16"
        self.value = (precision.initial_loss_scale or INITIAL) if self.is_enabled else 1.0
        self._interval = precision.loss_scale_growth_interval or GROWTH_INTERVAL
        self._num_good = 0

    def update(self, *, is_finite: bool) -> None:
        """Adjust the scale after an update.

        Args:
            is_finite: True if the global gradient norm was finite.
        """
        if not self.is_enabled:
            return
        # The rule and the defaults of torch.amp.GradScaler.
        self._num_good = self._num_good + 1 if is_finite else 0
        if not is_finite:
            self.value /= 2
        elif self._num_good == self._interval:
            self.value, self._num_good = self.value * 2, 0

    def state_dict(self) -> dict[str, object]:
        """Return the state to save in a checkpoint."""
        return {"loss_scale": self.value, "num_updates_without_overflow": self._num_good}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Load the state; keys are absent, and nothing changes, if it was saved without fp16.

        Raises:
            DamagedCheckpointError: If a value has the wrong type or range.
        """
        value, num_good = (
            state.get("loss_scale", self.value),
            state.get("num_updates_without_overflow", self._num_good),
        )
        if not isinstance(value, float) or not isinstance(num_good, int) or not value > 0:
            raise DamagedCheckpointError(
                f"progress.json must contain a loss scale, but contains {dict(state)}: load "
                "another step."
            )
        if self.is_enabled:
            self.value, self._num_good = value, num_good
