"""Keep passwords and tokens out of config.yaml, which reports and trackers show.

A secret must be given as an environment variable, `${oc.env:NAME}`, and is written in that form.
"""

import re
from collections.abc import Iterator, Mapping

from temper_engine_api.errors import ConfigError
from temper_trainer.config_loading.schema import Plain, flatten

_SECRET_NAME = re.compile(
    r"(^|_)((api|access|secret|private)_?key|secret|password|passwd|credentials?|(hf|api|auth|access|bearer)_token)$|^token$",
    re.IGNORECASE,
)
"""Last component of a key whose value is a secret. `messages_key` and `end_token` must not match.
"""
_OPEN_BLOCKS = re.compile(r"(arguments|engine_kwargs)\.[^.]+$")
"""Blocks whose keys users choose; no other key takes a secret."""
_PASSWORD_IN_URL = re.compile(r"://[^/\s:@]*:[^/\s@]+@")
_VARIABLE = "${oc.env:"


def check_secrets(composed: Mapping[str, Plain]) -> None:
    """Raise if a secret is given as literal text.

    Args:
        composed: The configuration with its interpolations.

    Raises:
        ConfigError: If the value of a key such as `api_key` is literal text, or a URL has a
            password.
    """
    for key, value in flatten(dict(composed)).items():
        name = key.rpartition(".")[2]
        if _is_secret(key) and isinstance(value, str) and value and _VARIABLE not in value:
            raise ConfigError(
                f"{key} is a secret in plain text, which config.yaml, the report and the trackers "
                "would show: put it into an environment variable, and set "
                f"{key}='${{oc.env:{name.upper()}}}'."
            )
        if any(_PASSWORD_IN_URL.search(text) for text in _find_strings(value)):
            raise ConfigError(
                f"{key} is a URL with a password, which config.yaml, the report and the trackers "
                "would show: give the password to the library that opens the URL, by its own "
                "environment variable or file."
            )


def restore_secret_references(
    resolved: Mapping[str, Plain], *, composed: Mapping[str, Plain]
) -> dict[str, Plain]:
    """Return the resolved values with every secret replaced by its interpolation."""
    secrets = {
        key: value
        for key, value in flatten(dict(composed)).items()
        if _is_secret(key) and isinstance(value, str)
    }

    def replace_secrets(tree: Mapping[str, Plain], prefix: str) -> dict[str, Plain]:
        return {
            name: replace_secrets(value, f"{prefix}{name}.")
            if isinstance(value, dict)
            else secrets.get(f"{prefix}{name}", value)
            for name, value in tree.items()
        }

    return replace_secrets(resolved, "")


def _is_secret(key: str) -> bool:
    return (
        _OPEN_BLOCKS.search(key) is not None
        and _SECRET_NAME.search(key.rpartition(".")[2]) is not None
    )


def _find_strings(value: Plain) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _find_strings(item)
