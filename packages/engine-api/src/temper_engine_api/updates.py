"""State of an optimizer update: gradients, skipped updates, counters and loss scale."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Literal

import torch
from torch import Tensor

from temper_engine_api.errors import DamagedCheckpointError, EngineStateError
from temper_engine_api.specs import PrecisionSpec

INITIAL_LOSS_SCALE = 65536.0
LOSS_SCALE_GROWTH_INTERVAL = 2000
"""Defaults of torch.amp.GradScaler: the first scale, and the number of updates without an overflow
after which the scale doubles."""


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(".")


class GradientState(Enum):
    """State of the gradient buffers within one update."""

    EMPTY = "empty"
    """Not computed since `optimizer_zero_grad`."""
    ACCUMULATED = "accumulated"
    """Local sums that are not reduced across ranks yet."""
    REDUCED = "reduced"
    """Reduced across ranks; only `optimizer_step` or `optimizer_zero_grad` is allowed."""
    APPLIED = "applied"
    """Used by `optimizer_step`; only `optimizer_zero_grad` is allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """Result of the last `optimizer_step`; the same on every rank except for `sample_ids`.

    Example:
        An update on a rank with the samples 8 and 9, whose gradients overflowed in fp16:

        >>> report = UpdateReport(grad_norm=math.inf, outcome="nonfinite", sample_ids=(8, 9))
        >>> report.outcome == "stepped"
        False
    """

    grad_norm: float
    """Global norm before clipping; NaN or infinite for 'nonfinite', 0.0 for 'nothing_trained'."""
    outcome: Literal["stepped", "nonfinite", "nothing_trained"]
    """Unless 'stepped', weights, optimizer states and learning rate did not change."""
    sample_ids: tuple[int, ...]
    """Ids of this rank's samples if the outcome is 'nonfinite', else empty."""


class LossScale:
    """Dynamic loss scale of fp16: halved after an overflow, doubled after updates without one.

    It is 1 for other compute dtypes. It depends only on the global gradient norm, so all ranks have
    the same scale without communication.
    """

    def __init__(self, precision: PrecisionSpec) -> None:
        self.is_enabled = precision.compute == "fp16"
        initial = precision.initial_loss_scale or INITIAL_LOSS_SCALE
        self.value = initial if self.is_enabled else 1.0
        self._interval = precision.loss_scale_growth_interval or LOSS_SCALE_GROWTH_INTERVAL
        self._num_good = 0

    def update(self, *, is_finite: bool) -> None:
        """Adjust the scale after an update.

        Args:
            is_finite: True if the global gradient norm was finite.
        """
        if not self.is_enabled:
            return
        # The rule of torch.amp.GradScaler.
        self._num_good = self._num_good + 1 if is_finite else 0
        if not is_finite:
            self.value /= 2
        elif self._num_good == self._interval:
            self.value, self._num_good = self.value * 2, 0

    def state_dict(self) -> dict[str, object]:
        """Return the state to save in a checkpoint."""
        return {"loss_scale": self.value, "num_updates_without_overflow": self._num_good}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Load the state. A state that was saved without fp16 lacks the keys and changes nothing.

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


class UpdateCycle:
    """Checks the call order within an update, and counts updates.

    An update accumulates gradients, reduces them across ranks once, and steps or is skipped. The
    engine does the computation.
    """

    def __init__(self, precision: PrecisionSpec) -> None:
        self.last_update: UpdateReport | None = None
        self.num_updates = 0
        self.num_nonfinite_updates = 0
        self.num_schedule_steps = 0
        self.num_weight_changes = 0
        """Number of steps and loads that may have changed weights; not saved in checkpoints."""
        self.loss_scale = LossScale(precision)
        self._consecutive_skips = 0
        self._interrupted_changes: dict[str, str] = {}
        """Exceptions that interrupted a change of the parameters, by call; empty if they are
        consistent."""
        self.start()

    def start(self) -> None:
        """Start an update without gradients."""
        self._gradients = GradientState.EMPTY
        self._failure: str | None = None
        self._interruption: str | None = None
        """Exception that left `train_mode` between two calls; None if there was none."""
        self.trains_something = False
        """True if a pass of this update trained a token. If it is False, the step changes nothing.
        """
        self._pending_sample_ids: list[Tensor] = []

    @contextmanager
    def record_training_call(self, *, result: GradientState) -> Iterator[None]:
        """Enclose a call that changes gradients or parameters, and record its effect on them.

        An exception marks the update as failed: gradients may be partly accumulated or reduced.

        Args:
            result: State of the gradients after the call; with APPLIED it changes parameters.
        """
        try:
            yield
        except BaseException as error:
            self._failure = _describe(error)
            if result is GradientState.APPLIED:
                self._interrupted_changes["optimizer_step()"] = self._failure
                self.num_weight_changes += 1
            raise
        self._gradients = result

    @contextmanager
    def record_load(
        self,
        call: str,
        *,
        completes: frozenset[str] = frozenset(),
        harmless: tuple[type[Exception], ...] = (),
    ) -> Iterator[None]:
        """Enclose a call that replaces parameters, and record whether it replaced all.

        Args:
            call: Name of the call, such as `load_weights()`.
            completes: Other calls whose parameters it replaces too.
            harmless: Exceptions after which no parameter has changed.
        """
        try:
            yield
        except harmless:
            raise
        except BaseException as error:
            self._interrupted_changes[call] = _describe(error)
            raise
        for completed in {call, *completes}:
            self._interrupted_changes.pop(completed, None)

    def interrupt(self, error: BaseException) -> None:
        """Note that an exception left `train_mode` outside a call.

        If gradients wait for further calls of the update, these are missing now.
        """
        if self._gradients is GradientState.ACCUMULATED:
            self._interruption = _describe(error)

    @property
    def has_failed(self) -> bool:
        """True if a call of this update raised, so that its gradients must be discarded."""
        return self._failure is not None

    def check_not_failed(self) -> None:
        """Raise EngineStateError if a call of this update or its mode raised."""
        self.check_parameters()
        if self._failure is not None:
            raise EngineStateError(
                f"a call of this update raised ({self._failure}), so its gradients are incomplete: "
                "call optimizer_zero_grad() to discard the update and start again."
            )
        if self._interruption is not None:
            raise EngineStateError(
                f"an exception left train_mode() ({self._interruption}) before the final call of "
                "this update, so its gradients are incomplete: call optimizer_zero_grad() to "
                "discard the update and start again."
            )

    def check_parameters(self) -> None:
        """Raise EngineStateError if a step or load was interrupted and nothing loaded since."""
        for call, failure in self._interrupted_changes.items():
            done, remedy = "loaded", f"call {call} again"
            if call == "optimizer_step()":
                done, remedy = "updated", "load a checkpoint"
            raise EngineStateError(
                f"{call} raised while it changed the parameters ({failure}), so some of them may "
                f"be {done} and others not: {remedy}, or build a new engine."
            )

    def check_can_accumulate(self) -> None:
        """Raise EngineStateError if this update failed, or its gradients are already reduced."""
        self.check_not_failed()
        if self._gradients in (GradientState.REDUCED, GradientState.APPLIED):
            raise EngineStateError(
                "the gradients of this update are already reduced: call optimizer_zero_grad() "
                "before the next update, and pass final=False to all calls of an update but the "
                "last."
            )

    def record_samples(self, sample_ids: Tensor, *, are_trained: bool) -> None:
        """Record the samples of a backward pass.

        Args:
            sample_ids: [B] ids; those below 0 are dummies.
            are_trained: True if the mini-batch has a trained token.
        """
        self.trains_something |= are_trained
        self._pending_sample_ids.append(sample_ids)

    def check_can_step(self) -> None:
        """Raise EngineStateError if this update failed, or there are no gradients to apply."""
        self.check_not_failed()
        if self._gradients in (GradientState.EMPTY, GradientState.APPLIED):
            raise EngineStateError(
                "there are no gradients: run a backward pass between optimizer_zero_grad() and "
                "optimizer_step()."
            )

    @property
    def has_unreduced_gradients(self) -> bool:
        """True if gradients were added up, but the final pass, which reduces them, is missing."""
        return self._gradients is GradientState.ACCUMULATED

    def finish(self, norm: float, *, max_consecutive_skips: int) -> None:
        """Report the update, count it, and adjust the loss scale.

        Args:
            norm: Global gradient norm before clipping.
            max_consecutive_skips: Number of consecutive non-finite updates that is allowed.

        Raises:
            EngineStateError: If more consecutive updates were not finite.
        """
        if not self.trains_something:
            self.last_update = UpdateReport(
                grad_norm=norm, outcome="nothing_trained", sample_ids=()
            )
            return
        # The scale is updated only with trained tokens: without them the norm says nothing about
        # it.
        self.loss_scale.update(is_finite=math.isfinite(norm))
        if math.isfinite(norm):
            self.num_updates += 1
            self.num_weight_changes += 1
            self._consecutive_skips = 0
            self.last_update = UpdateReport(grad_norm=norm, outcome="stepped", sample_ids=())
            return
        # Samples of all passes, because the norm does not show which one was not finite.
        ids = torch.cat(self._pending_sample_ids)
        samples = tuple(ids[ids >= 0].tolist())
        self.num_nonfinite_updates += 1
        self._consecutive_skips += 1
        self.last_update = UpdateReport(grad_norm=norm, outcome="nonfinite", sample_ids=samples)
        if self._consecutive_skips > max_consecutive_skips:
            raise EngineStateError(
                f"{self._consecutive_skips} updates in a row had a non-finite gradient (norm "
                f"{norm}), but optimizer.max_consecutive_skips allows {max_consecutive_skips}. "
                f"Lower optimizer.lr, or check the last samples of this rank: {samples[:8]}."
                + self._describe_loss_scale()
            )

    def _describe_loss_scale(self) -> str:
        if not self.loss_scale.is_enabled:
            return ""
        return (
            f" The fp16 loss scale has dropped to {self.loss_scale.value}: if it started too high, "
            "lower precision.initial_loss_scale, without a checkpoint, which restores its own "
            "scale; otherwise use precision.compute bf16."
        )

    def state_dict(self) -> dict[str, object]:
        """Return the counters to save in a checkpoint."""
        return {
            "num_updates": self.num_updates,
            "num_schedule_steps": self.num_schedule_steps,
            "num_nonfinite_updates": self.num_nonfinite_updates,
            "consecutive_skips": self._consecutive_skips,
            **(self.loss_scale.state_dict() if self.loss_scale.is_enabled else {}),
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Load the counters of `state_dict`.

        Raises:
            DamagedCheckpointError: If a counter is missing or is not an integer.
        """
        names = ["num_updates", "num_schedule_steps", "num_nonfinite_updates", "consecutive_skips"]
        counts = [count for count in map(state.get, names) if isinstance(count, int)]
        if len(counts) < len(names):
            raise DamagedCheckpointError(
                f"progress.json must contain the counters {names}, but contains {dict(state)}: "
                "load another step."
            )
        (
            self.num_updates,
            self.num_schedule_steps,
            self.num_nonfinite_updates,
            self._consecutive_skips,
        ) = counts
        self.loss_scale.load_state_dict(state)
        self.last_update = None
