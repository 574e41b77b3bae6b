"""Keep passwords and tokens out of config.yaml, which reports and trackers show.

A secret may be given by a variable of the environment alone, `${oc.env:NAME}`. It is written as that text.
"""

import re
from collections.abc import Iterator, Mapping

from temper_engine_api.errors import ConfigError
from temper_trainer.config_loading.schema import Plain, flatten

_SECRET_NAME = re.compile(
    r"(^|_)((api|access|secret|private)_?key|secret|password|passwd|credentials?|(hf|api|auth|access|bearer)_token)$|^token$",
    re.IGNORECASE,
)
"""Last part of a key whose value is a secret. Not every `*_key` and `*_token`: `messages_key` and `end_token` are none."""
_OPEN_BLOCKS = re.compile(r"(arguments|engine_kwargs)\.[^.]+$")
"""Keys that users name themselves. No other key of ours takes a secret."""
_PASSWORD_IN_URL = re.compile(r"://[^/\s:@]*:[^/\s@]+@")
_VARIABLE = "${oc.env:"


def check_secrets(composed: Mapping[str, Plain]) -> None:
    """Refuse secrets that are written out.

    Args:
        composed: The configuration with its interpolations.

    Raises:
        ConfigError: If the value of a key such as `api_key` is a literal text, or an address holds a password.
    """
    for key, value in flatten(dict(composed)).items():
        name = key.rpartition(".")[2]
        if _is_secret(key) and isinstance(value, str) and value and _VARIABLE not in value:
            raise ConfigError(
                f"{key} is a secret that is written out, and the run's config.yaml, its report and its trackers would "
                f"show it: put it into a variable of the environment, and set {key}='${{oc.env:{name.upper()}}}'."
            )
        if any(_PASSWORD_IN_URL.search(text) for text in _texts(value)):
            raise ConfigError(
                f"{key} is an address with a password, which the run's config.yaml, its report and its trackers would "
                "show: give the password to the library that opens it, by its own variable of the environment or file."
            )


def restore_secret_references(
    resolved: Mapping[str, Plain], *, composed: Mapping[str, Plain]
) -> dict[str, Plain]:
    """Return the resolved values with every secret as the interpolation that it was given by."""
    secrets = {
        key: value
        for key, value in flatten(dict(composed)).items()
        if _is_secret(key) and isinstance(value, str)
    }

    def copied(tree: Mapping[str, Plain], prefix: str) -> dict[str, Plain]:
        return {
            name: copied(value, f"{prefix}{name}.")
            if isinstance(value, dict)
            else secrets.get(f"{prefix}{name}", value)
            for name, value in tree.items()
        }

    return copied(resolved, "")


def _is_secret(key: str) -> bool:
    return (
        _OPEN_BLOCKS.search(key) is not None
        and _SECRET_NAME.search(key.rpartition(".")[2]) is not None
    )


def _texts(value: Plain) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
