"""Keep passwords and tokens out of config.yaml, which reports and trackers show.

A secret must be given as an environment variable, `${oc.env:NAME}`, and is written in that form.
"""

import os
import re
from collections.abc import Iterator, Mapping

from temper_engine_api.errors import ConfigError
from temper_trainer.config_loading.schema import Plain, flatten

_SECRET_WORD = re.compile(
    r"(secrets?|passwords?|passwd|passphrase|credentials?|jwt)$"
    r"|^(auth|authorization|bearer|cookies?|dsn|(user|db)?pass|pat|pwd|webhook)$"
    r"|^api_?(keys|tokens)$"
)
"""A word of a key whose value is a secret, besides `key` and `token`, also in `mypassword`."""
_KEY_OR_TOKEN = re.compile(r"^(.*)(key|token)$")
_HARMLESS_OWNERS = re.compile(
    r"answer|begin|bos|chosen|cls|column|completion|end|eos|extra|first|group|image|label|last"
    r"|mask|max|messages?|min|num|pad|prompt|question|reference|rejected|response|reward|route"
    r"|score|sep|solution|sort|start|stop|target|task|text|think|unk"
)
"""Words before `key` and `token` for a column of the data, a special token or a count."""
_HARMLESS_NEXT = re.compile(
    r"budget|cost|count|dim|file|ids|length|level|limit|name|path|penalty|type|weight"
)
"""Words after `key`, `token` and the like that make the value no secret."""
_OWNERS_OF_MANY = ("access", "api", "auth", "bearer", "refresh", "secret")
"""Words before `keys` and `tokens` that make a secret: `stop_tokens` are none."""
_OPEN_BLOCKS = re.compile(r"(arguments|engine_kwargs)\.[^.]+$")
"""Blocks whose keys users choose; no other key takes a secret."""

_VARIABLE = "${oc.env:"
_VARIABLE_NAME = re.compile(r"oc\.env:\s*['\"]?([A-Za-z_][A-Za-z0-9_]*)")
_SECRET_VARIABLE = re.compile(
    r"(token|key|secret|secrets|password|passwords|passwd|passphrase|credential|credentials|jwt"
    r"|(^|_)(auth|authorization|bearer|cookie|cookies|dsn|pass|pat|pwd|webhook))(_|$)",
    re.IGNORECASE,
)
"""Name of an environment variable whose value is a secret. Wider than the rule for keys, because a
false match only means that the reference is written in place of its value."""
_WORKING_DIRECTORY = ("PWD", "OLDPWD")
"""Paths that must be written as values: a resume may be started in another directory."""
_SHORTEST_UNNAMED = 8
"""Minimum characters of a secret that is found by its value; shorter ones match by chance."""

_REFERENCE = re.compile(r"['\"]?\$\{oc\.env:[^{}]*\}['\"]?")
"""A value that names a variable, and so holds no secret."""
_KEY_IN_TEXT = re.compile(r"([\w.-]+)['\"]?\s*[:=]")
"""A key inside the text of a mapping, such as `api_key` in `{api_key: ...}`."""
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


def redact_override(text: str) -> str:
    """Return an override with its value hidden if it may be a secret, for error messages.

    The value is hidden by the rules of `check_secrets`, and if it is the value of a secret
    environment variable. The override may be one that cannot be parsed, so text is searched: all of
    its keys count, and quotes and braces around them are ignored.

    Example:
        >>> redact_override("run.seed=1,2")
        'run.seed=1,2'
        >>> redact_override("+reward.arguments.api_key=a,b")
        '+reward.arguments.api_key=<hidden>'
    """
    key, separator, value = text.partition("=")
    names = (key.strip("+~ '\""), *_KEY_IN_TEXT.findall(value))
    is_secret = _REFERENCE.fullmatch(value) is None and any(
        _names_secret(name.rpartition(".")[2]) for name in names
    )
    hides_variable = any(secret in text for secret in _list_secret_values())
    patterns = (_KNOWN_TOKEN, _PASSWORD_IN_URL, _TOKEN_IN_URL)
    if not (is_secret or hides_variable or any(pattern.search(text) for pattern in patterns)):
        return text
    # Without a key, the text itself may be the secret.
    return f"{key}=<hidden>" if separator and not _has_pattern(key) else "<hidden>"


def _has_pattern(text: str) -> bool:
    return _KNOWN_TOKEN.search(text) is not None or any(
        secret in text for secret in _list_secret_values()
    )


def _list_secret_values() -> list[str]:
    """Return the values of environment variables whose names say that they are secrets."""
    return [
        value
        for name, value in os.environ.items()
        if _is_secret_variable(name) and len(value) >= _SHORTEST_UNNAMED
    ]


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
        # In every value, because any key may have a URL.
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
    secrets = _list_secret_values()

    def restore(value: Plain, given: Plain, key: str) -> Plain:
        # Other interpolations are written with their values, so that the file is complete.
        if isinstance(given, str) and "${" in given:
            return given if _has_secret(value, given, key, secrets=secrets) else value
        if isinstance(value, dict) and isinstance(given, dict):
            return {
                name: restore(item, given.get(name), f"{key}.{name}" if key else name)
                for name, item in value.items()
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
    return _OPEN_BLOCKS.search(key) is not None and _names_secret(key.rpartition(".")[2])


def _names_secret(name: str) -> bool:
    """Return True if the last component of a key names a password, a token or a key.

    Example:
        >>> [_names_secret(name) for name in ("llm_key", "botToken", "api_key_2", "pass")]
        [True, True, True, True]
        >>> [_names_secret(name) for name in ("prompt_key", "end_token", "max_tokens")]
        [False, False, False]
    """
    separated = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    words = [word for word in re.split(r"[^a-z]+", separated) if word]
    padded = ["", *words, ""]
    for previous, word, following in zip(padded[:-2], words, padded[2:], strict=True):
        if _HARMLESS_NEXT.fullmatch(following):
            continue
        if _SECRET_WORD.search(word) and not (word == "pass" and following):
            return True
        if word in ("keys", "tokens") and previous in _OWNERS_OF_MANY:
            return True
        match = _KEY_OR_TOKEN.search(word)
        # `pad_token_id` is a number of the vocabulary, but `access_key_id` is part of a secret.
        if match is not None and not (match[2] == "token" and following == "id"):
            owner = match[1] or previous
            if _HARMLESS_OWNERS.fullmatch(owner) is None:
                return True
    return False


def _find_strings(value: Plain) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _find_strings(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _find_strings(item)
