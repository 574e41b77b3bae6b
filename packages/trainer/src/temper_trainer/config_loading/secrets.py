"""Keep passwords and tokens out of config.yaml, which reports and trackers show.

A secret must be given as an environment variable, `${oc.env:NAME}`, and is written in that form.
"""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Literal

from temper_engine_api.errors import ConfigError
from temper_trainer.config_loading.schema import Plain, flatten
from temper_trainer.redaction import (
    HIDDEN,
    PASSWORD_IN_URL,
    is_secret_variable,
    list_secret_forms,
    list_secret_variables,
)

_SECRET_WORD = re.compile(
    r"(secrets?|passwords?|passwd|passphrase|credentials?|jwt)$"
    r"|^(auth|authorization|bearer|cookies?|dsn|(user|db)?pass|pat|pwd|webhook)$"
    r"|^api_?(keys|tokens)$"
)
"""Words that make a key's value a secret, in addition to `key` and `token`. Those of the first line
also count at the end of a word, as in `mypassword`."""
_KEY_OR_TOKEN = re.compile(r"^(.*)(key|token)$")
_HARMLESS_PREFIXES = re.compile(
    r"answer|begin|bos|category|chosen|cls|column|completion|difficulty|end|eos|extra|first|group|image"
    r"|label|last|margin|mask|max|messages?|min|num|pad|prompt|question|reference|rejected|response"
    r"|reward|route|weight"
    r"|score|sep|solution|sort|start|stop|target|task|text|think|unk"
)
"""Words before `key` and `token` that make the value no secret: they name a column of the data, a
special token or a count."""
_HARMLESS_SUFFIXES = re.compile(
    r"budget|cost|count|dim|file|ids|length|level|limit|name|path|penalty|type|variable|weight"
)
"""Words after `key`, `token` and the like that make the value no secret."""
_SECRET_PREFIXES = ("access", "api", "auth", "bearer", "refresh", "secret")
"""Words before `keys` and `tokens` that make the value a secret. `stop_tokens` is not secret."""
_BLOCKS_WITH_USER_KEYS = re.compile(r"(^|\.)(arguments|engine_kwargs)\.")
"""Blocks in which users choose the keys. A key outside them cannot hold a secret."""

_VARIABLE = "${oc.env:"
_VARIABLE_NAME = re.compile(r"oc\.env:\s*['\"]?([A-Za-z_][A-Za-z0-9_]*)")
_REFERENCE = re.compile(r"['\"]?\$\{oc\.env:[^{}]*\}['\"]?")
"""A value that names a variable."""
_INNERMOST_REFERENCE = re.compile(r"\$\{([^{}]*)\}")
_HARMLESS_LITERAL = re.compile(
    r"((bearer|basic|digest|token|api-?key)\b|none|null|empty|missing|unset|dummy"
    r"|https?://[^\s@]*|@\S*)?[\s:=,;'\"]*",
    re.IGNORECASE,
)
"""Literal text that is allowed in a secret value: next to a reference to a variable, or as the
default of the reference."""
_KEY_IN_TEXT = re.compile(r"([\w.-]+)['\"]?\s*[:=]")
"""A key inside the text of a mapping, such as `api_key` in `{api_key: ...}`."""
_USER_IN_URL = re.compile(
    r"(https?://(?!git@)|://(?=[^\s/@?#]{20,}@)(?=[^\s/@?#]*[0-9]))(?!\$\{)[^\s/:@?#]+@",
    re.IGNORECASE,
)
"""A user without a password, which for HTTP is usually a token."""
_URL_PARAMETER = re.compile(r"(?<=[?&#;])([\w.-]+)=(?!\$\{)[^&#;\s]")
_SECRET_PARAMETERS = ("sig", "signature", "x-amz-signature", "x-goog-signature")
"""Names of further URL parameters with secrets, which `_names_secret` does not find."""
_HOOK_URL = re.compile(
    r"://(hooks\.(slack|zapier)\.com|discord(app)?\.com/api/webhooks|[\w.-]*webhook\.office\.com)"
    r"/[\w./-]"
    r"|://api\.telegram\.org/(file/)?bot[0-9]+:"
    r"|://\S*/(web)?hooks?[\w.-]*/(\S*/)?(?=[\w-]*[0-9])[\w-]{16,}",
    re.IGNORECASE,
)
"""URLs of webhooks: anyone who knows one can post to it."""
_HEADER = re.compile(
    r"\b(proxy-)?authorization['\"]?\s*[:=]\s*['\"]?(?!((bearer|basic|digest|token)\s+)?\$\{)\S"
    r"|\b(x-)?(api-key|auth-token)['\"]?\s*:\s*['\"]?(?!\$\{)\S"
    r"|\bbearer\s+(?=\S*[0-9])[\w.~+/=-]{12,}",
    re.IGNORECASE,
)
"""HTTP headers that authenticate."""
_KNOWN_TOKEN = re.compile(
    r"(?<![\w-])("
    r"hf_[A-Za-z0-9]{20,}"
    r"|sk-(?=[\w-]*[0-9])[\w-]{16,}"
    r"|gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}|glpat-[\w-]{16,}"
    r"|(AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{35}|ya29\.[\w-]{20,}"
    r"|xox[abeprs]-[\w-]{10,}|xapp-[\w-]{20,}"
    r"|(npm|gsk|r8|glsa|shpat|dop_v1|lin_api)_[A-Za-z0-9]{20,}"
    r"|(tgp_v1|wandb_v1|dckr_pat)_[\w-]{20,}|(xai|pplx|fw)-[A-Za-z0-9]{20,}"
    r"|nvapi-[\w-]{20,}|[sr]k_(live|test)_[A-Za-z0-9]{16,}|hvs\.[\w-]{20,}|pypi-Ag[\w-]{20,}"
    r"|SG\.[\w-]{16,}\.[\w-]{16,}"
    r"|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\."
    r")|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
"""Tokens with a prefix of their issuer (Hugging Face, OpenAI, GitHub, GitLab, AWS, Google, Slack,
npm, Groq, Replicate, Together, Stripe and others), JWTs and private keys."""


def redact_override(text: str) -> str:
    """Return an override with its value hidden if it may be a secret, for error messages.

    The value is hidden by the rules of `check_secrets`, and if it is the value of a secret
    environment variable. The text is searched without parsing, because an override with a syntax
    error must be hidden, too. All keys in it count, and quotes and braces around them are ignored.

    Example:
        >>> redact_override("run.seed=1,2")
        'run.seed=1,2'
        >>> redact_override("+reward.arguments.api_key=a,b")
        '+reward.arguments.api_key=<hidden>'
    """
    key, separator, value = text.partition("=")
    names = (key.strip("+~ '\""), *_KEY_IN_TEXT.findall(value))
    is_reference = _REFERENCE.fullmatch(value) is not None and not _has_secret_literal(value)
    is_secret = not is_reference and any(_names_secret(name.rpartition(".")[2]) for name in names)
    if not (is_secret or _has_variable_value(text) or _describe_secret(text) is not None):
        return text
    # Without a key, the text itself may be the secret.
    return f"{key}={HIDDEN}" if separator and not _has_pattern(key) else HIDDEN


def _has_pattern(text: str) -> bool:
    return _KNOWN_TOKEN.search(text) is not None or _has_variable_value(text)


def _has_variable_value(text: str) -> bool:
    return any(_contains(text, secret) for secret in list_secret_variables().values())


def _contains(text: str, secret: str) -> bool:
    """Return True if a text contains a secret in one of its forms, such as base64."""
    return any(form in text for form in list_secret_forms(secret))


def check_secrets(composed: Mapping[str, Plain]) -> None:
    """Raise if a secret is given as literal text; the message does not repeat it.

    Args:
        composed: The configuration before its interpolations are resolved.

    Raises:
        ConfigError: If a key such as `api_key` has literal text in its value; or if any value looks
            like a token, contains the value of a secret environment variable, or is a URL with a
            password or a token.
    """
    variables = list_secret_variables()
    for key, value in flatten(dict(composed)).items():
        for text in filter(None, _find_strings(value)):
            name = key.rpartition(".")[2].upper().replace("-", "_")
            advice = f"put it into an environment variable, and set {key}='${{oc.env:{name}}}'."
            exposure = "which config.yaml, the report and the trackers would show"
            if _is_secret(key) and (_VARIABLE not in text or _has_secret_literal(text)):
                raise ConfigError(f"{key} is a secret in plain text, {exposure}: {advice}")
            for variable, secret in variables.items():
                if _contains(text, secret):
                    raise ConfigError(
                        f"{key} contains the value of the environment variable {variable}, "
                        f"{exposure}: set {key}='${{oc.env:{variable}}}', in quotes, so that the "
                        "shell does not insert the value."
                    )
            # In every value, because any key may have a URL.
            match _describe_secret(text):
                case None:
                    continue
                case ("password" | "token") as noun:
                    raise ConfigError(
                        f"{key} is a URL with a {noun}, {exposure}: give the {noun} to the library "
                        "that opens the URL, by its own environment variable or file."
                    )
                case _:
                    raise ConfigError(f"{key} is a secret in plain text, {exposure}: {advice}")


def _describe_secret(text: str) -> Literal["password", "token", "text"] | None:
    """Return what a text contains in plain text: the password or token of a URL, or another secret.

    Example:
        >>> [_describe_secret(text) for text in ("s3://a:b@c", "https://a?api-key=b", "a@b")]
        ['password', 'token', None]
    """
    if _KNOWN_TOKEN.search(text) or _HEADER.search(text) or _HOOK_URL.search(text):
        return "text"
    if PASSWORD_IN_URL.search(text):
        return "password"
    if _USER_IN_URL.search(text):
        return "token"
    _, separator, rest = text.partition("://")
    names = _URL_PARAMETER.findall(rest) if separator else []
    is_token = any(name.lower() in _SECRET_PARAMETERS or _names_secret(name) for name in names)
    return "token" if is_token else None


def _has_secret_literal(text: str) -> bool:
    """Return True if a text with references has other text, or a default, that may be a secret.

    Example:
        >>> [_has_secret_literal(text) for text in ("Bearer ${oc.env:A}", "${oc.env:A,b}")]
        [False, True]
    """
    literals = []
    # From the inside out, because a default may be a reference itself.
    while match := _INNERMOST_REFERENCE.search(text):
        if match[1].startswith("oc.env:"):
            literals.append(match[1].partition(",")[2])
        text = f"{text[: match.start()]}\0{text[match.end() :]}"
    literals += text.split("\0")
    return any(_HARMLESS_LITERAL.fullmatch(literal.strip(" '\"\0")) is None for literal in literals)


def restore_secret_references(
    resolved: Mapping[str, Plain], *, composed: Mapping[str, Plain]
) -> dict[str, Plain]:
    """Return the resolved values with every secret replaced by its interpolation."""
    secrets = list(list_secret_variables().values())

    def restore(value: Plain, raw: Plain, key: str) -> Plain:
        # Other interpolations are written with their values, so that the file is complete.
        if isinstance(raw, str) and "${" in raw:
            return raw if _has_secret(value, raw, key, secrets=secrets) else value
        if isinstance(value, dict) and isinstance(raw, dict):
            return {
                name: restore(item, raw.get(name), f"{key}.{name}" if key else name)
                for name, item in value.items()
            }
        if isinstance(value, list) and isinstance(raw, list) and len(value) == len(raw):
            return [restore(item, other, key) for item, other in zip(value, raw, strict=True)]
        return value

    restored = restore(dict(resolved), dict(composed), "")
    assert isinstance(restored, dict)
    return restored


def find_secret_values(
    resolved: Mapping[str, Plain], *, written: Mapping[str, Plain]
) -> Iterator[str]:
    """Yield the values of all secrets in a configuration.

    Args:
        resolved: The configuration with the values of its secrets.
        written: The configuration as `restore_secret_references` returns it, in which an
            interpolation replaces each secret.
    """
    written_values = flatten(dict(written))
    for key, value in flatten(dict(resolved)).items():
        written_value = written_values.get(key, value)
        if value == written_value:
            continue
        known = list(_find_strings(written_value))
        variables = (
            os.environ.get(name) for each in known for name in _VARIABLE_NAME.findall(each)
        )
        # The full text, and the part that a program may extract from it.
        for secret in (*(_find_strings(value) if known else ()), *filter(None, variables)):
            if secret not in known and _HARMLESS_LITERAL.fullmatch(secret) is None:
                yield secret


def _has_secret(value: Plain, interpolation: str, key: str, *, secrets: list[str]) -> bool:
    """Return True if the value of an interpolation must not be written.

    The name of the key, or of an environment variable in the interpolation, may say so. Otherwise
    compare the value with the known secrets, because an interpolation may refer to another key
    (`${reward.arguments.auth}`) or compute the name of a variable.
    """
    if _is_secret(key) or any(map(is_secret_variable, _VARIABLE_NAME.findall(interpolation))):
        return True
    return any(
        _describe_secret(text) is not None or any(_contains(text, secret) for secret in secrets)
        for text in _find_strings(value)
    )


def _is_secret(key: str) -> bool:
    return _BLOCKS_WITH_USER_KEYS.search(key) is not None and _names_secret(key.rpartition(".")[2])


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
        if _HARMLESS_SUFFIXES.fullmatch(following):
            continue
        if _SECRET_WORD.search(word) and not (word == "pass" and following):
            return True
        if word in ("keys", "tokens") and previous in _SECRET_PREFIXES:
            return True
        match = _KEY_OR_TOKEN.search(word)
        # `pad_token_id` is a vocabulary index, but `access_key_id` is part of a secret.
        if match is not None and not (match[2] == "token" and following == "id"):
            prefix = match[1] or previous
            if _HARMLESS_PREFIXES.fullmatch(prefix) is None:
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
