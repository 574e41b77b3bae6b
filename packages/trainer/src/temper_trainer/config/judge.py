"""Settings of judges: models behind an OpenAI-compatible endpoint that score completions."""

import re
from collections.abc import Mapping
from dataclasses import field

from temper_engine_api.errors import ConfigError
from temper_engine_api.specs import Scalar
from temper_trainer.settings.names import suggest_name
from temper_trainer.settings.ranges import (
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    check_order,
    check_pattern,
)
from temper_trainer.settings.variants import settings

TEMPLATE_FIELD = re.compile(r"\{([a-z_]+)(?:\.([\w.-]+))?\}")
"""A field of a judge's template: {question}, or {extra.NAME}. Other braces, such as those of a JSON
example, are text."""
_TEMPLATE_FIELDS = ("question", "completion", "reference", "extra")
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@settings
class JudgeConfig:
    """A language model that scores completions, such as a general one or a generative reward model.

    Each completion is sent to the endpoint's ``chat/completions``, and the score is read from the
    answer.
    """

    base_url: str
    """URL of the endpoint, usually ending in ``/v1``."""
    model: str
    """Name of the model at the endpoint."""
    prompt: str
    """Template of the user message. It must contain {completion} and may contain {question},
    {reference} and {extra.NAME}, which is a field of the source's extra_keys.
    """
    system_prompt: str | None = None
    """System message; None sends none."""
    score_pattern: str | None = None
    """Regular expression that finds the score in the answer. The last match counts: its group 1, or
    the entire match if the expression has no group. Exclusive with score_field.
    """
    score_field: str | None = None
    """Field with the score in the last JSON object of the answer; a nested field is OUTER.INNER."""
    min_score: FiniteFloat = 0.0
    """Lowest valid score; a lower score counts as failed."""
    max_score: FiniteFloat = 1.0
    """Highest valid score; a higher score counts as failed."""
    api_key_variable: str | None = None
    """Name of the environment variable with the API key; None for endpoints without one. The key
    cannot be given in another way.
    """
    max_tokens: PositiveInt = 1024
    """Maximum length of the answer in tokens, including reasoning."""
    temperature: NonNegativeFloat | None = 0.0
    """Sampling temperature; None leaves it to the endpoint."""
    request_arguments: Mapping[str, Scalar] = field(default_factory=dict)
    """Additional request fields, such as reasoning_effort."""
    max_concurrency: PositiveInt = 16
    """Maximum number of simultaneous requests."""
    request_timeout_s: PositiveFloat = 60.0
    """Maximum time in seconds to wait for data of one request; then it is retried."""
    timeout_s: PositiveFloat = 180.0
    """Maximum time of one score in seconds, including retries; then it counts as a timeout."""
    max_retries: NonNegativeInt = 4
    """Retries of a request after a timeout, a lost connection, or status 408, 409, 429 or 5xx. The
    delay grows exponentially from 0.5 to 8 s; a Retry-After of up to two minutes is followed.
    """
    usd_per_million_prompt_tokens: NonNegativeFloat = 0.0
    """Price, for the metric of the cost."""
    usd_per_million_completion_tokens: NonNegativeFloat = 0.0
    """Price of the answer's tokens, for the metric of the cost."""

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"base_url is {self.base_url!r}, but must start with http:// or https://."
            )
        self._check_template()
        self._check_score()
        if self.api_key_variable is not None and not _VARIABLE_NAME.fullmatch(
            self.api_key_variable
        ):
            # The value is not repeated, because it may be the key itself.
            raise ConfigError(
                "api_key_variable is not the name of an environment variable: give the name of "
                "the variable that contains the key, such as JUDGE_API_KEY."
            )

    @property
    def extra_fields(self) -> frozenset[str]:
        """Names of the fields of extra_keys that the template uses."""
        return frozenset(
            name for root, name in TEMPLATE_FIELD.findall(self.prompt) if root == "extra"
        )

    def _check_template(self) -> None:
        fields = {match[0]: (match[1], match[2]) for match in TEMPLATE_FIELD.finditer(self.prompt)}
        for text, (root, name) in fields.items():
            if root in _TEMPLATE_FIELDS and (name is not None) == (root == "extra"):
                continue
            raise ConfigError(
                f"prompt contains {text}, which is not a field: use {{question}}, {{completion}}, "
                f"{{reference}} or {{extra.NAME}}.{suggest_name(root, _TEMPLATE_FIELDS[:-1])}"
            )
        if "{completion}" not in fields:
            raise ConfigError(
                f"prompt is {self.prompt!r:.80}, but must contain {{completion}}, the text to "
                "score."
            )

    def _check_score(self) -> None:
        if (self.score_pattern is None) == (self.score_field is None):
            raise ConfigError(
                f"score_pattern is {self.score_pattern!r} and score_field is {self.score_field!r}, "
                "but exactly one of them must be set: it says where the score is in the answer."
            )
        check_pattern("score_pattern", self.score_pattern)
        check_order("min_score", self.min_score, "max_score", self.max_score)
