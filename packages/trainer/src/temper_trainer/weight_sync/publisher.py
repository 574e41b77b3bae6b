"""Publishing: the actor's weights become the sampler's, under a number that every completion then carries."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from temper_engine_api.errors import WeightError
from temper_trainer.weight_sync.transport import Transport


class PublishTarget(Protocol):
    """A sampler, as far as publishing is concerned."""

    @property
    def weight_version(self) -> int:
        """Of the weights it holds; -1 before the first set."""
        ...

    def logprobs(self, tokens: Sequence[Sequence[int]], *, temperature: float) -> list[list[float]]:
        """Log-prob of each token but the first of its sequence."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """A token sequence whose log-probs engine and sampler must agree on after every publish."""

    tokens: tuple[int, ...]
    """Two or more token ids."""
    engine_logprobs: Callable[[], Sequence[float]]
    """The engine's log-prob of each token but the first, at temperature 1, under its present weights."""
    tolerance: float
    """Largest accepted difference."""


class Publisher:
    """Numbers the sets of weights and hands them over; knows what the sampler must hold."""

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
            transport: How weights get to the sampler.
            sampler: What receives them.
            version: Of the weights that the sampler has now.
            software: What the sampler runs on, with versions, for error messages.
        """
        self._software = software
        self._transport = transport
        self._sampler = sampler
        self.version = version

    def publish(self, canary: Canary | None = None) -> dict[str, float]:
        """Hand over the present weights under the next number.

        Args:
            canary: compared afterwards where given.

        Returns:
            Metrics: time, version, what was sent, and the canary's largest difference.

        Raises:
            WeightError: the set is damaged or does not fit, the sampler reports another version, or the canary differs.
        """
        begin = time.perf_counter()
        version = self.version + 1
        sent = self._transport.send(version)
        if self._sampler.weight_version != version:
            raise WeightError(
                f"weights {version} were published, but the sampler holds {self._sampler.weight_version}."
            )
        self.version = version
        metrics = {
            "weight_sync/time_s": time.perf_counter() - begin,
            "weight_sync/version": float(version),
            "weight_sync/bytes": float(sent.num_bytes),
            "weight_sync/sent_fraction": sent.fraction,
        }
        if canary is not None:
            metrics["weight_sync/canary_difference"] = self._compare(canary)
        return metrics

    def _compare(self, canary: Canary) -> float:
        (sampled,) = self._sampler.logprobs([canary.tokens], temperature=1.0)
        trained = canary.engine_logprobs()
        # torch rather than max(): a NaN on either side must not hide behind a number.
        difference = float((torch.tensor(sampled) - torch.tensor(trained)).abs().max())
        if not difference <= canary.tolerance:
            software = f" The sampler runs on {self._software}." if self._software else ""
            raise WeightError(
                f"after publishing weights {self.version}, engine and sampler differ by "
                f"{difference:.4g} in a log-prob of the canary prompt (accepted: "
                f"rollout.canary_tolerance = {canary.tolerance}): the sampler does not hold the "
                "engine's weights, or their compute dtypes differ more than the tolerance allows."
                f"{software} If that version is not a tested one, install one that is; if the "
                "difference comes from the dtypes, raise rollout.canary_tolerance."
            )
        return difference
