"""Keep passwords and tokens out of config.yaml, which reports and trackers show.

A secret must be given as an environment variable, `${oc.env:NAME}`, and is written in that form.
"""

import os
import re
from collections.abc import Iterator, Mapping

from temper_engine_api.errors import ConfigError
from temper_trainer.config_loading.schema import Plain, flatten

_OWNERS = (
    "access|anthropic|api|auth|aws|azure|bearer|client|cohere|csrf|deepseek|encryption|gcp|"
    "gemini|github|gitlab|google|groq|hf|huggingface|identity|judge|mistral|oauth|openai|"
    "openrouter|private|refresh|secret|security|server|service|session|signing|slack|ssh|"
    "together|wandb|webhook"
)
"""Words before `key` and `token` that make a secret: `prompt_key` and `end_token` are none."""
_SECRET_KEY = re.compile(
    r"^(token|pat|jwt|pwd)$"
    rf"|(^|_)({_OWNERS})_?(key|token)$"
    r"|(^|_)(secrets?|passwords?|passwd|passphrase|credentials?|auth|authorization|bearer"
    r"|(github|gitlab|azure)_pat|jwt|cookies?|dsn|webhook)(_(url|header))?$",
    re.IGNORECASE,
)
"""Last component of a key whose value is a secret."""
_OPEN_BLOCKS = re.compile(r"(arguments|engine_kwargs)\.[^.]+$")
"""Blocks whose keys users choose; no other key takes a secret."""

_VARIABLE = "${oc.env:"
_VARIABLE_NAME = re.compile(r"oc\.env:\s*['\"]?([A-Za-z_][A-Za-z0-9_]*)")
_SECRET_VARIABLE = re.compile(
    r"(token|key|secret|secrets|password|passwords|passwd|passphrase|credential|credentials|jwt"
    r"|(^|_)(auth|authorization|bearer|cookie|cookies|dsn|pass|pat|pwd|webhook))(_|$)",
    re.IGNORECASE,
)
"""Name of an environment variable whose value is a secret. Wider than `_SECRET_KEY`, because a
false match only means that the reference is written in place of its value."""
_WORKING_DIRECTORY = ("PWD", "OLDPWD")
"""Paths that must be written as values: a resume may be started in another directory."""
_SHORTEST_UNNAMED = 8
"""Minimum characters of a secret that is found by its value; shorter ones match by chance."""

_PASSWORD_IN_URL = re.compile(r"://[^/\s:@]*:[^/\s@]+@")
_TOKEN_IN_URL = re.compile(
    r"://\S*[?&](api_?key|key|(access_|auth_)?token|auth|sig|signature|password|secret"
    r"|x-amz-signature)=(?!\$\{)[^&\s]",
    re.IGNORECASE,
)
_KNOWN_TOKEN = re.compile(
    r"(?<![\w-])("
    r"hf_[A-Za-z0-9]{20,}"
    r"|sk-(?=[\w-]*[0-9])[\w-]{16,}"
    r"|gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}|glpat-[\w-]{16,}"
    r"|(AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{35}"
    r"|xox[abprs]-[\w-]{10,}"
    r"|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\."
    r")|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
"""Tokens of Hugging Face, OpenAI, GitHub, GitLab, AWS, Google and Slack, JWTs and private keys."""


def check_secrets(composed: Mapping[str, Plain]) -> None:
    """Raise if a secret is given as literal text; the message does not repeat it.

    Args:
        composed: The configuration with its interpolations.

    Raises:
        ConfigError: If the value of a key such as `api_key` is literal text, a value looks like a
            token, or a URL has a password or a token.
    """
    for key, value in flatten(dict(composed)).items():
        texts = [text for text in _find_strings(value) if text]
        if (_is_secret(key) and any(_VARIABLE not in text for text in texts)) or any(
            _KNOWN_TOKEN.search(text) for text in texts
        ):
            name = key.rpartition(".")[2].upper().replace("-", "_")
            raise ConfigError(
                f"{key} is a secret in plain text, which config.yaml, the report and the trackers "
                "would show: put it into an environment variable, and set "
                f"{key}='${{oc.env:{name}}}'."
            )
        for pattern, noun in ((_PASSWORD_IN_URL, "password"), (_TOKEN_IN_URL, "token")):
            if any(pattern.search(text) for text in texts):
                raise ConfigError(
                    f"{key} is a URL with a {noun}, which config.yaml, the report and the "
                    f"trackers would show: give the {noun} to the library that opens the URL, by "
                    "its own environment variable or file."
                )


def restore_secret_references(
    resolved: Mapping[str, Plain], *, composed: Mapping[str, Plain]
) -> dict[str, Plain]:
    """Return the resolved values with every secret replaced by its interpolation."""
    secrets = [
        value
        for name, value in os.environ.items()
        if _is_secret_variable(name) and len(value) >= _SHORTEST_UNNAMED
    ]

    def restore(value: Plain, given: Plain, key: str) -> Plain:
        if isinstance(given, str) and "${" in given:
            return given if _has_secret(value, given, key, secrets=secrets) else value
        if isinstance(value, dict) and isinstance(given, dict):
            return {
                name: restore(below, given.get(name), f"{key}.{name}" if key else name)
                for name, below in value.items()
            }
        if isinstance(value, list) and isinstance(given, list) and len(value) == len(given):
            return [restore(item, other, key) for item, other in zip(value, given, strict=True)]
        return value

    restored = restore(dict(resolved), dict(composed), "")
    assert isinstance(restored, dict)
    return restored


def _has_secret(value: Plain, given: str, key: str, *, secrets: list[str]) -> bool:
    """Return True if the value of an interpolation must not be written.

    Besides names, the values of secret variables are searched for, because an interpolation may
    refer to another key (`${reward.arguments.auth}`) or compute the variable's name.
    """
    if _is_secret(key) or any(map(_is_secret_variable, _VARIABLE_NAME.findall(given))):
        return True
    return any(
        pattern.search(text)
        for text in _find_strings(value)
        for pattern in (_KNOWN_TOKEN, _PASSWORD_IN_URL, _TOKEN_IN_URL)
    ) or any(secret in text for text in _find_strings(value) for secret in secrets)


def _is_secret_variable(name: str) -> bool:
    return name not in _WORKING_DIRECTORY and _SECRET_VARIABLE.search(name) is not None


def _is_secret(key: str) -> bool:
    name = key.rpartition(".")[2].replace("-", "_")
    return _OPEN_BLOCKS.search(key) is not None and _SECRET_KEY.search(name) is not None


def _find_strings(value: Plain) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _find_strings(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _find_strings(item)
