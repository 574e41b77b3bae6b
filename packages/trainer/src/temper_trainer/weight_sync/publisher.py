"""Publish the actor's weights to the sampler under a version that every completion then carries."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from temper_engine_api.errors import WeightError
from temper_trainer.weight_sync.transport import Transport


class PublishTarget(Protocol):
    """The methods of a sampler that publishing needs."""

    @property
    def weight_version(self) -> int:
        """Version of its weights; -1 or 0 before the first publish."""
        ...

    def compute_logprobs(
        self, tokens: Sequence[Sequence[int]], *, temperature: float
    ) -> list[list[float]]:
        """Return the log-prob for each token except its sequence's first."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """A token sequence whose log-probs engine and sampler must agree on after every publish.

    It finds errors that checksums cannot find, such as weights loaded under a wrong name.
    """

    tokens: tuple[int, ...]
    """Two or more token ids."""
    engine_logprobs: Callable[[], Sequence[float]]
    """Returns the engine's log-prob of each token but the first, at temperature 1."""
    tolerance: float
    """Largest accepted difference of a log-prob, in nats."""


class Publisher:
    """Numbers the actor's weights, sends them, and checks that the sampler has them."""

    def __init__(
        self,
        *,
        transport: Transport,
        sampler: PublishTarget,
        version: int = 0,
        software: str = "",
    ) -> None:
        """Create a publisher.

        Args:
            transport: Carries the actor's weights to the sampler.
            sampler: Receives the weights.
            version: Version of the weights that the sampler has now.
            software: The sampler's software with versions, for error messages.
        """
        self._software = software
        self._transport = transport
        self._sampler = sampler
        self.version = version

    def publish(self, canary: Canary | None = None) -> dict[str, float]:
        """Send the actor's current weights under the next version and return metrics.

        Args:
            canary: Tokens whose log-probs in engine and sampler are compared after the weights
                were sent; None compares nothing.

        Raises:
            WeightError: If the weights are damaged or do not fit, the sampler reports another
                version, or the canary differs.
        """
        begin = time.perf_counter()
        version = self.version + 1
        sent = self._transport.send(version)
        # A sampler that keeps old weights would still sample, only from the wrong policy.
        if self._sampler.weight_version != version:
            raise WeightError(
                f"weights {version} were published, but the sampler has weights "
                f"{self._sampler.weight_version}: look at the sampler's log."
            )
        # Raise the version only after success. Otherwise a failed publish would make old
        # completions look new.
        self.version = version
        metrics = {
            "weight_sync/time_s": time.perf_counter() - begin,
            "weight_sync/version": float(version),
            "weight_sync/bytes": float(sent.num_bytes),
            "weight_sync/sent_fraction": sent.fraction,
        }
        if canary is not None:
            metrics["weight_sync/canary_difference"] = self._compare_canary(canary)
        return metrics

    def _compare_canary(self, canary: Canary) -> float:
        """Return the largest difference of a log-prob, or raise WeightError if it is too large."""
        (sampled,) = self._sampler.compute_logprobs([canary.tokens], temperature=1.0)
        trained = canary.engine_logprobs()
        self._check_numbers(sampled=sampled, trained=trained)
        # torch's max() propagates NaN; Python's max() may hide it behind a number. Infinities on
        # both sides differ by NaN.
        difference = float((torch.tensor(sampled) - torch.tensor(trained)).abs().max())
        # `not <=` instead of `>`, so that a NaN fails.
        if not difference <= canary.tolerance:
            software = f" The sampler runs on {self._software}." if self._software else ""
            raise WeightError(
                f"after publishing weights {self.version}, engine and sampler differ by "
                f"{difference:.4g} in a log-prob of the canary prompt (accepted: "
                f"rollout.canary_tolerance = {canary.tolerance}): the sampler does not have the "
                "engine's weights, or their compute dtypes differ more than the tolerance allows."
                f"{software} If that software was not tested, install a tested version; if the "
                "difference comes from the dtypes, raise rollout.canary_tolerance."
            )
        return difference

    def _check_numbers(self, *, sampled: Sequence[float], trained: Sequence[float]) -> None:
        """Raise WeightError if a log-prob is NaN, which is no difference between two dtypes."""
        if any(map(math.isnan, trained)):
            raise WeightError(
                f"after publishing weights {self.version}, the engine's log-probs of the canary "
                "prompt are NaN: its weights contain NaN or infinity, or overflow in its compute "
                "dtype. Check the files of actor.engine.model.path. If the run has trained before, "
                "continue from an earlier checkpoint with a lower optimizer.lr."
            )
        if any(map(math.isnan, sampled)):
            raise WeightError(
                f"after publishing weights {self.version}, the sampler's log-probs of the canary "
                "prompt are NaN, but the engine's are numbers: the weights were damaged on their "
                "way, or overflow in rollout.dtype."
            )
