"""Settings of the correction for a sampler whose log-probs differ from the trainer's."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import field
from typing import ClassVar, Literal

from temper_engine_api.errors import ConfigError
from temper_trainer.settings.names import suggest_name
from temper_trainer.settings.ranges import PositiveFloat, check_order
from temper_trainer.settings.variants import Variant, settings, variant

REJECTION_RULES = tuple(
    f"{statistic}_{over}"
    for statistic in ("ratio", "k2", "k3")
    for over in ("token", "sum", "mean", "max")
)
"""Names of the rules in algorithm.rollout_correction.reject."""


@settings
class RejectionBounds:
    """Bounds of one rule; what is outside them gets weight 0."""

    low: PositiveFloat | None = None
    """Lower bound on p_old / p_rollout; only for the rules by ratio. None is none."""
    high: PositiveFloat | None = None
    """Upper bound: on p_old / p_rollout, or on the KL(sampler, trainer) in nats. None is none."""


class RolloutCorrection(Variant):
    """Importance weights w = p_old / p_rollout, and the rejection of tokens and completions.

    They correct the difference between the sampler's log-probs and the trainer's. Rejected tokens
    keep counting in the loss denominators.

    An alternative of ``algorithm.rollout_correction`` is a class with the decorator
    ``variant(name)``; its fields are its settings.
    """

    __slots__ = ()
    level: ClassVar[Literal["token", "sequence", "none"]] = "none"
    """Span of the ratio that is the weight; none is a weight of 1."""
    needs_rules: ClassVar[bool] = False
    """True if it does nothing without rules of rejection."""
    replaces_old_logprobs: ClassVar[bool] = False
    """True if the policy loss's ratio is to the sampler's log-probs."""

    @property
    @abstractmethod
    def reject(self) -> Mapping[str, RejectionBounds]:
        """Bounds by rule of rejection; a field of every alternative."""

    @property
    def truncate_at(self) -> float | None:
        """Upper bound on the weights; a field of the alternatives that have weights."""
        return None

    @property
    def self_normalize(self) -> bool:
        """True if weights are divided by their mean; a field of those that have weights."""
        return False

    @property
    def has_weights(self) -> bool:
        """True if some weight may be other than 1, also by rejection."""
        return self.level != "none" or bool(self.reject)


@settings
class RejectingCorrection(RolloutCorrection):
    """Reject tokens and completions by rules."""

    reject: Mapping[str, RejectionBounds] = field(default_factory=dict)
    """Bounds by rule; a token must pass all of them. A rule is the name of a statistic (ratio, or
    the KL estimator k2 or k3) and of what it is taken over (token, or sum, mean or max over the
    completion), such as ratio_token or k3_mean.
    """

    def __post_init__(self) -> None:
        name = "algorithm.rollout_correction"
        for rule, bounds in self.reject.items():
            _check_rejection_rule(rule, bounds, key=f"{name}.reject")
        if self.needs_rules and not self.reject:
            raise ConfigError(
                f"{name} is {self.name} and reject is empty, so there is no correction: set a rule "
                "such as reject.ratio_token.high, or remove the block."
            )


@settings
class WeighingCorrection(RejectingCorrection):
    """Multiply the policy loss by weights."""

    truncate_at: PositiveFloat | None = 2.0
    """Upper bound on the weights; larger weights are lowered to it. None does not truncate."""
    self_normalize: bool = False
    """Divide the weights by their mean over the step's trained tokens."""


@variant("token")
class TokenWeights(WeighingCorrection):
    """Weight each token with its own ratio."""

    level: ClassVar[Literal["token", "sequence", "none"]] = "token"


@variant("sequence")
class SequenceWeights(WeighingCorrection):
    """Weight all tokens of a completion with the product of its ratios."""

    level: ClassVar[Literal["token", "sequence", "none"]] = "sequence"


@variant("mask")
class Mask(RejectingCorrection):
    """Only reject; what is kept has weight 1."""

    needs_rules: ClassVar[bool] = True


@variant("rollout_ratio")
class RolloutRatio(RejectingCorrection):
    """Use the sampler's log-probs as the denominator of the policy loss's ratio.

    p / p_rollout = (p / p_old) * (p_old / p_rollout), so the ratio itself is the correction, and
    there are no weights.
    """

    replaces_old_logprobs: ClassVar[bool] = True


def _check_rejection_rule(rule: str, bounds: RejectionBounds, *, key: str) -> None:
    if rule not in REJECTION_RULES:
        raise ConfigError(
            f"{key} names the rule {rule!r}, but must be one of {', '.join(REJECTION_RULES)}."
            f"{suggest_name(rule, REJECTION_RULES)}"
        )
    if not rule.startswith("ratio") and bounds.low is not None:
        raise ConfigError(
            f"{key}.{rule}.low is {bounds.low}, but a KL is best at 0 and has only an upper bound: "
            "remove it."
        )
    if bounds.low is None and bounds.high is None:
        raise ConfigError(f"{key}.{rule} has no bound: set high, or remove the rule.")
    check_order(f"{key}.{rule}.low", bounds.low, "high", bounds.high)
