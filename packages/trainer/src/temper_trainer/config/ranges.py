"""The range that a number of the configuration must lie in."""

import math

from temper_engine_api.errors import ConfigError


def check_range(
    key: str, value: float | None, *, at_least: float | None = None, above: float | None = None, at_most: float | None = None
) -> None:
    """Refuse a number outside its range; NaN and infinity are outside of every one, None (nothing set) inside.

    Args:
        key: what the sentence calls it: dotted, or bare in a block that stands under several keys.

    Raises:
        ConfigError: key, value, and what is expected.
    """
    if value is None:
        return
    is_inside = (
        math.isfinite(value)
        and (at_least is None or value >= at_least)
        and (above is None or value > above)
        and (at_most is None or value <= at_most)
    )
    if is_inside:
        return
    bounds = {"at least": at_least, "above": above, "at most": at_most}
    expected = " and ".join(f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None)
    raise ConfigError(f"{key} is {value}, but must be {expected or 'a finite number'}.")
