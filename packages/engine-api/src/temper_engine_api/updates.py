"""State machine of an optimizer update: gradients, skipped updates, and counters."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import torch
from torch import Tensor

from temper_engine_api.backend import EngineBackend
from temper_engine_api.batch import PackedBatch
from temper_engine_api.checkpoint import BackgroundSave, PartReport
from temper_engine_api.errors import DamagedCheckpointError, EngineStateError
from temper_engine_api.loss_scale import LossScale
from temper_engine_api.schedule import compute_learning_rate
from temper_engine_api.specs import EngineConfig


class GradientState(Enum):
    """State of the gradient buffers within one update."""

    EMPTY = "empty"
    """No backward pass since `optimizer_zero_grad`."""
    ACCUMULATED = "accumulated"
    """Local sums that are not reduced over ranks yet."""
    REDUCED = "reduced"
    """Reduced over ranks; only `optimizer_step` or `optimizer_zero_grad` is allowed."""
    APPLIED = "applied"
    """Used by `optimizer_step`; only `optimizer_zero_grad` is allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """Result of the last `optimizer_step`; the same on every rank except for `sample_ids`."""

    grad_norm: float
    """Global norm before clipping; NaN or infinite for 'nonfinite', 0.0 for 'nothing_trained'."""
    outcome: Literal["stepped", "nonfinite", "nothing_trained"]
    """Unless 'stepped', weights, optimizer states and learning rate did not change."""
    sample_ids: tuple[int, ...]
    """Ids of this rank's samples if the outcome is 'nonfinite', else empty."""


class UpdateCycle(EngineBackend):
    """Optimizer update of an engine: accumulate gradients, reduce them once, step or skip."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.last_update: UpdateReport | None = None
        self.num_nonfinite_updates = 0
        self.num_updates = 0
        self.num_schedule_steps = 0
        self.loss_scale = LossScale(config.precision)
        self._background_save = BackgroundSave[str]()
        self._background_part = BackgroundSave[PartReport]()
        self._gradients = GradientState.EMPTY
        self._trains_something = False
        self._pending_sample_ids: list[Tensor] = []
        self._consecutive_skips = 0

    def optimizer_zero_grad(self) -> None:
        """Reset gradients and start an update."""
        self._zero_gradients()
        self._gradients, self._trains_something, self._pending_sample_ids = (
            GradientState.EMPTY,
            False,
            [],
        )

    def optimizer_step(self) -> float:
        """Reduce pending gradients, clip them, and update the parameters.

        If a gradient on any rank is not finite, or the mini-batch trains no token, all ranks skip
        the update: weights, optimizer states and learning rate stay as they are, and `last_update`
        has the reason.

        Returns:
            The global gradient norm before clipping.

        Raises:
            EngineStateError: If there are no gradients or no optimizer, or after more than
                `optimizer.max_consecutive_skips` non-finite updates in a row.
        """
        if self.config.optimizer is None:
            raise EngineStateError(
                "this engine has no optimizer (optimizer: null) and can't step: configure one."
            )
        self._check_background_save()
        if self._gradients in (GradientState.EMPTY, GradientState.APPLIED):
            raise EngineStateError(
                "there are no gradients: run a backward pass between optimizer_zero_grad() and "
                "optimizer_step()."
            )
        with self._loaded("update"):
            if self._gradients is GradientState.ACCUMULATED:
                self._reduce_pending_gradients()
                self._gradients = GradientState.REDUCED
            norm = self._apply_gradients(lr=self.current_lr) if self._trains_something else 0.0
        if self._trains_something:
            self.loss_scale.update(is_finite=math.isfinite(norm))
        self._gradients = GradientState.APPLIED
        self._report_update(norm)
        return norm

    def finish_saving(self) -> None:
        """Wait for background saves, those of `stage_part` included. Collective.

        Raises:
            CheckpointError: If the save failed; earlier steps are unchanged.
        """
        self._background_part.wait()
        self._background_save.finish()

    def _check_background_save(self) -> None:
        """Raise the error of a background save if it has ended on all ranks; do not wait for it."""
        if self._background_save.is_pending and all(
            self._gather_objects(self._background_save.is_done)
        ):
            self._background_save.finish()

    def lr_scheduler_step(self) -> float:
        """Advance the schedule unless the last update was skipped; return the next learning rate."""
        if self.last_update is None or self.last_update.outcome == "stepped":
            self.num_schedule_steps += 1
        return self.current_lr

    @property
    def current_lr(self) -> float:
        """Learning rate of the next update."""
        if self.config.optimizer is None:
            return 0.0
        return compute_learning_rate(
            self.num_schedule_steps, peak=self.config.optimizer.lr, spec=self.config.schedule
        )

    def _record_backward(self, batch: PackedBatch, *, final: bool) -> None:
        if self.config.optimizer is None:
            raise EngineStateError(
                "this engine has no optimizer (optimizer: null) and can't train: configure one."
            )
        self._gradients = GradientState.REDUCED if final else GradientState.ACCUMULATED
        self._trains_something |= self._loss_fn is not None or not batch.denominators.is_empty
        self._pending_sample_ids.append(batch.sample_ids)

    def _report_update(self, norm: float) -> None:
        if not self._trains_something:
            self.last_update = UpdateReport(
                grad_norm=norm, outcome="nothing_trained", sample_ids=()
            )
        elif math.isfinite(norm):
            self.num_updates += 1
            self._consecutive_skips = 0
            self.last_update = UpdateReport(grad_norm=norm, outcome="stepped", sample_ids=())
        else:
            self._report_nonfinite(norm)

    def _report_nonfinite(self, norm: float) -> None:
        ids = (
            torch.cat(self._pending_sample_ids)
            if self._pending_sample_ids
            else torch.empty(0, dtype=torch.int64)
        )
        self.num_nonfinite_updates += 1
        self._consecutive_skips += 1
        self.last_update = UpdateReport(
            grad_norm=norm, outcome="nonfinite", sample_ids=tuple(ids[ids >= 0].tolist())
        )
        assert self.config.optimizer is not None
        if self._consecutive_skips > self.config.optimizer.max_consecutive_skips:
            raise EngineStateError(
                f"{self._consecutive_skips} updates in a row had a non-finite gradient (norm {norm}), but "
                "optimizer.max_consecutive_skips allows "
                f"{self.config.optimizer.max_consecutive_skips}. Lower optimizer.lr, or check the "
                f"last samples of this rank: {self.last_update.sample_ids[:8]}."
                + self._loss_scale_hint()
            )

    def _loss_scale_hint(self) -> str:
        if not self.loss_scale.is_enabled:
            return ""
        return (
            f" The fp16 loss scale has dropped to {self.loss_scale.value}: if it started too high, lower "
            "precision.initial_loss_scale; otherwise use precision.compute bf16."
        )

    def _progress(self) -> Mapping[str, object]:
        return {
            "num_updates": self.num_updates,
            "num_schedule_steps": self.num_schedule_steps,
            "num_nonfinite_updates": self.num_nonfinite_updates,
            "consecutive_skips": self._consecutive_skips,
            **(self.loss_scale.state_dict() if self.loss_scale.is_enabled else {}),
        }

    def _restore_progress(self, progress: Mapping[str, object]) -> None:
        names = ["num_updates", "num_schedule_steps", "num_nonfinite_updates", "consecutive_skips"]
        counts = [count for count in map(progress.get, names) if isinstance(count, int)]
        if len(counts) < len(names):
            raise DamagedCheckpointError(
                f"progress.json must contain the counters {names}, but contains {dict(progress)}: load "
                "another step."
            )
        (
            self.num_updates,
            self.num_schedule_steps,
            self.num_nonfinite_updates,
            self._consecutive_skips,
        ) = counts
        self.loss_scale.load_state_dict(progress)
        self.last_update = None
