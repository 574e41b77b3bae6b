"""The factor that keeps fp16 gradients away from zero: halved after an overflow, doubled after a long time without one."""

from collections.abc import Mapping

from temper_engine_api.errors import DamagedCheckpointError
from temper_engine_api.specs import PrecisionSpec

INITIAL = 65536.0
GROWTH_INTERVAL = 2000


class LossScale:
    """1 and never changing unless the compute dtype is fp16. The same on every rank, since every rank sees the same global norm."""

    def __init__(self, precision: PrecisionSpec) -> None:
        self.is_enabled = precision.compute == "fp16"
        self.value = (precision.initial_loss_scale or INITIAL) if self.is_enabled else 1.0
        self._interval = precision.loss_scale_growth_interval or GROWTH_INTERVAL
        self._num_good = 0

    def note(self, *, is_finite: bool) -> None:
        """After each attempt to update."""
        if not self.is_enabled:
            return
        self._num_good = self._num_good + 1 if is_finite else 0
        if not is_finite:
            self.value /= 2
        elif self._num_good == self._interval:
            self.value, self._num_good = self.value * 2, 0

    def state(self) -> dict[str, object]:
        """For a checkpoint."""
        return {"loss_scale": self.value, "num_updates_without_overflow": self._num_good}

    def restore(self, state: Mapping[str, object]) -> None:
        """From a checkpoint; one that was written without fp16 leaves it as it is.

        Raises:
            DamagedCheckpointError: it holds something else.
        """
        value, num_good = (
            state.get("loss_scale", self.value),
            state.get("num_updates_without_overflow", self._num_good),
        )
        if not isinstance(value, float) or not isinstance(num_good, int) or not value > 0:
            raise DamagedCheckpointError(
                f"progress.json should hold a loss scale, but holds {dict(state)}: load a step that is whole."
            )
        if self.is_enabled:
            self.value, self._num_good = value, num_good
