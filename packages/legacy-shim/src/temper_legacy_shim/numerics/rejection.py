"""Rejection rules of the old rollout correction, for tokens or sequences."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from temper_engine_api.errors import ConfigError
from temper_legacy_shim.numerics.masked_losses import masked_mean, masked_sum

MAX_LOG_RATIO = 20.0
RULES = (
    *(f"token_k{k}" for k in (1, 2, 3)),
    *(f"seq_sum_k{k}" for k in (1, 2, 3)),
    *(f"seq_mean_k{k}" for k in (1, 2, 3)),
    *(f"seq_max_k{k}" for k in (2, 3)),
)
"""A level, and a divergence of log-ratio d: k1 is -d, k2 is d^2 / 2, k3 is exp(d) - 1 - d."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule and the range in which a token or sequence stays."""

    name: str
    low: float | None
    """Logarithm of the lower bound of a k1 rule; None for the others, which have none."""
    high: float
    """Upper bound; its logarithm for a k1 rule."""

    @property
    def level(self) -> str:
        """token, seq_sum, seq_mean or seq_max."""
        return self.name.rpartition("_")[0]


def parse_rules(names: str, thresholds: str | float | None) -> list[Rule]:
    """Return the rules from two comma-separated lists; one threshold serves them all.

    Raises:
        ConfigError: an unknown rule, or thresholds that do not fit.
    """
    expected = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    unknown = [name for name in expected if name not in RULES]
    if unknown or not expected:
        raise ConfigError(
            f"rollout_rs is {names!r} ({unknown} unknown), but must name rules among "
            f"{', '.join(RULES)}."
        )
    bounds = [
        part.strip()
        for part in str("" if thresholds is None else thresholds).split(",")
        if part.strip()
    ]
    if len(bounds) not in (1, len(expected)):
        raise ConfigError(
            f"rollout_rs_threshold is {thresholds!r}, but {names!r} needs one bound, or one for "
            "each rule."
        )
    return [
        _rule(name, bound)
        for name, bound in zip(
            expected, bounds * (len(expected) if len(bounds) == 1 else 1), strict=True
        )
    ]


def _rule(name: str, bound: str) -> Rule:
    parts = bound.split("_")
    has_range = name.endswith("k1")
    try:
        numbers = [float(part) for part in parts]
    except ValueError as error:
        raise ConfigError(
            f"rollout_rs_threshold {bound!r} of rule {name} is no number, nor two of them as in "
            "0.5_2.0."
        ) from error
    if min(numbers) <= 0 or len(numbers) > (2 if has_range else 1):
        raise ConfigError(
            f"rollout_rs_threshold {bound!r} of rule {name} must be one number above 0, or for a "
            "k1 rule two as in 0.5_2.0."
        )
    if not has_range:
        return Rule(name=name, low=None, high=numbers[0])
    low, high = numbers if len(numbers) == 2 else (1.0 / numbers[0], numbers[0])
    return Rule(name=name, low=math.log(low), high=math.log(high))


def rejected(
    log_ratio: Tensor, *, mask: Tensor, rules: str, thresholds: str | float | None
) -> tuple[Tensor, dict[str, float]]:
    """Return the mask without rejected tokens, and each rule's metrics."""
    keep = torch.ones_like(mask, dtype=torch.bool)
    numbers: dict[str, float] = {}
    has_tokens = mask.sum(-1) > 0
    for rule in parse_rules(rules, thresholds):
        statistic, rows = _statistic(rule, log_ratio=log_ratio, mask=mask)
        kept = (statistic <= rule.high) & (True if rule.low is None else statistic >= rule.low)
        keep &= kept
        numbers |= _rule_numbers(rule, statistic=statistic, rows=rows[has_tokens], mask=mask)
        row_kept = (kept | ~mask.bool()).all(-1)
        prefix = f"rollout_rs_{rule.name}"
        numbers[f"{prefix}_masked_fraction"] = float(masked_mean((~kept).float(), mask))
        numbers[f"{prefix}_seq_masked_fraction"] = (
            float((~row_kept)[has_tokens].float().mean()) if bool(has_tokens.any()) else 0.0
        )
    numbers["rollout_rs_masked_fraction"] = float(masked_mean((~keep).float(), mask))
    numbers["rollout_rs_seq_masked_fraction"] = float((~keep & mask.bool()).any(-1).float().mean())
    return mask * keep, numbers


def _statistic(rule: Rule, *, log_ratio: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the statistic [B, W] that the bound applies to, and [B] per row."""
    safe = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    tokens = {"1": -safe, "2": 0.5 * safe.square(), "3": safe.exp() - 1.0 - safe}[rule.name[-1]]
    if rule.level == "token":
        return tokens, masked_mean(tokens, mask, dim=-1)
    if rule.level == "seq_sum":
        rows = masked_sum(tokens, mask, dim=-1)
    elif rule.level == "seq_mean":
        rows = masked_mean(tokens, mask, dim=-1)
    else:
        largest = tokens.masked_fill(~mask.bool(), -math.inf).amax(-1)
        # A row without trained tokens has no maximum; with 0, no rule rejects it.
        rows = torch.where(largest == -math.inf, 0.0, largest)
    return rows[:, None].expand_as(tokens), rows


def _rule_numbers(rule: Rule, *, statistic: Tensor, rows: Tensor, mask: Tensor) -> dict[str, float]:
    low = 0.0 if rule.low is None else rule.low
    counted = statistic[mask.bool()] if rule.level == "token" else rows
    bounded = statistic.clamp(low, rule.high)
    mean = masked_mean(bounded, mask)
    # E[x^2] - E[x]^2 can be slightly negative after rounding.
    variance = (masked_mean(bounded.square(), mask) - mean.square()).clamp(min=0.0)
    numbers = {
        "mean": masked_mean(statistic, mask),
        "max": counted.max(),
        "min": counted.min(),
        "fraction_high": _fraction(statistic > rule.high, rows > rule.high, rule=rule, mask=mask),
        "fraction_low": 0.0
        if rule.low is None
        else _fraction(statistic < low, rows < low, rule=rule, mask=mask),
        "std": variance.sqrt() if int(mask.sum()) > 1 else 0.0,
        "seq_mean": rows.mean(),
        "seq_std": rows.std() if rows.numel() > 1 else 0.0,
        "seq_max": rows.max(),
        "seq_min": rows.min(),
        "seq_max_deviation": rows.abs().max(),
        "seq_fraction_high": (rows > rule.high).float().mean(),
    }
    if rule.low is not None:
        numbers["seq_fraction_low"] = (rows < low).float().mean()
    return {f"rollout_rs_{rule.name}_{name}": float(value) for name, value in numbers.items()}


def _fraction(of_tokens: Tensor, find_rows: Tensor, *, rule: Rule, mask: Tensor) -> Tensor:
    return (
        masked_mean(of_tokens.float(), mask) if rule.level == "token" else find_rows.float().mean()
    )
