"""Read an old config (mapping, OmegaConf tree or dataclass) with the old defaults."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from temper_engine_api.errors import ConfigError
from temper_legacy_shim.numerics.policy_losses import PolicyLossSettings, RolloutCorrectionSettings

SettingsT = TypeVar("SettingsT")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ActorSettings:
    """Settings of a policy update, without sizes and the policy loss."""

    loss_agg_mode: str = "token-mean"
    """See ``numerics.masked.aggregate``."""
    entropy_coeff: float = 0.0
    """Weight of the entropy."""
    calculate_entropy: bool = False
    """Report the entropy even if the weight is 0."""
    use_kl_loss: bool = False
    """Add the KL to ref_log_prob."""
    kl_loss_coef: float = 0.001
    kl_loss_type: str = "low_var_kl"
    use_rollout_log_probs: bool = False
    """Keep the given old_log_probs also where the only update of a call could do without."""
    calculate_sum_pi_squared: bool = False
    """Return the sum of squared probabilities with the log-probs."""
    grad_clip: float | None = None
    """Largest gradient norm; kept by the engine."""

    @property
    def wants_entropy(self) -> bool:
        """True if an update needs the head's entropy."""
        return self.calculate_entropy or self.entropy_coeff != 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CriticSettings:
    """Settings of a value update, without sizes."""

    cliprange_value: float = 0.5
    loss_agg_mode: str = "token-mean"
    """See ``numerics.masked.aggregate``."""
    grad_clip: float | None = None
    """Largest gradient norm; kept by the engine."""


def plain(config: object) -> dict[str, object]:
    """Return the config as nested dictionaries.

    Raises:
        ConfigError: it is no mapping, OmegaConf tree or dataclass.
    """
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {
            field.name: _plain_value(getattr(config, field.name))
            for field in dataclasses.fields(config)
        }
    # An OmegaConf tree is a mapping by behavior, though not always by type; interpolations are
    # resolved by reading.
    if isinstance(config, Mapping) or type(config).__name__ == "DictConfig":
        items = cast("Mapping[Any, object]", config)
        return {str(key): _plain_value(items[key]) for key in items}
    raise ConfigError(
        "a config must be a mapping, an OmegaConf tree or a dataclass, but is a "
        f"{type(config).__name__}."
    )


def _plain_value(value: object) -> object:
    if isinstance(value, Mapping) or type(value).__name__ == "DictConfig":
        return plain(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(value)
    if isinstance(value, list | tuple) or type(value).__name__ == "ListConfig":
        return [_plain_value(item) for item in cast("list[object]", value)]
    return value


def block(config: Mapping[str, object], name: str) -> dict[str, object]:
    """Return a nested block, empty if it is missing or null.

    Raises:
        ConfigError: it is no block.
    """
    value = config.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be a block of settings, but is {value!r}.")
    return value


def known(cls: type[SettingsT], values: Mapping[str, object]) -> SettingsT:
    """Build a settings class from the known values that are set; defaults otherwise."""
    names = {field.name for field in dataclasses.fields(cast("Any", cls))}
    return cls(
        **{name: value for name, value in values.items() if name in names and value is not None}
    )


def policy_loss_settings(config: Mapping[str, object]) -> PolicyLossSettings:
    own = block(config, "policy_loss")
    ratio = config.get("clip_ratio", 0.2)
    values: dict[str, object] = {
        **own,
        **{name: config.get(name) for name in ("clip_ratio_c", "tau_pos", "tau_neg")},
        "clip_low": ratio if config.get("clip_ratio_low") is None else config["clip_ratio_low"],
        "clip_high": ratio if config.get("clip_ratio_high") is None else config["clip_ratio_high"],
        "rollout_correction": _rollout_correction(own),
    }
    return known(PolicyLossSettings, values)


def _rollout_correction(own: Mapping[str, object]) -> RolloutCorrectionSettings:
    given = block(own, "rollout_correction")
    result = known(RolloutCorrectionSettings, given)
    # None means "off" for these two, where for other keys it means "the default".
    if "rollout_is" in given and given["rollout_is"] is None:
        result = dataclasses.replace(result, rollout_is=None)
    return result
