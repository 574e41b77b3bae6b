"""Parse requests in the format of OpenAI's API."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from temper_trainer.environment.tool_calls import parse_json

JsonObject = Mapping[str, Any]

_WITHOUT_EFFECT = frozenset(
    {"metadata", "model", "parallel_tool_calls", "prompt_cache_key", "safety_identifier"}
    | {"service_tier", "store", "user"}
)
"""Fields that change no completion here."""
_SET_BY_RUN = frozenset(
    {"frequency_penalty", "presence_penalty", "seed", "temperature", "top_k", "top_p"}
)
"""Fields that requests can't set: completions must follow the run's sampling distribution."""
_ROLES = frozenset({"assistant", "developer", "system", "tool", "user"})


class RequestError(ValueError):
    """A request that cannot be answered; the message is sent to the agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOptions:
    """The fields of a request that its completion depends on, besides what is completed."""

    max_tokens: int | None
    stop: tuple[str, ...]
    has_logprobs: bool
    """True if the response must contain a log-prob per token."""
    num_ignored: int
    """Number of sampling parameters whose value is replaced by that of the run."""
    is_streamed: bool = False
    """True if the response is a stream of events."""
    has_usage: bool = False
    """True if the last event has the numbers of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """The body of ``/v1/chat/completions``."""

    messages: Sequence[dict[str, Any]]
    """Messages whose content is text, in the form that chat templates take."""
    tools: Sequence[dict[str, Any]]
    """Schemas of the tools that the policy may call; empty if it may call none."""
    options: CompletionOptions


def parse_chat_request(body: object) -> ChatRequest:
    """Return a request for a chat completion.

    Raises:
        RequestError: If a field is missing, wrong or not supported.

    Example:
        >>> request = parse_chat_request(
        ...     {"messages": [{"role": "user", "content": "6*7?"}], "max_tokens": 8}
        ... )
        >>> request.messages
        [{'role': 'user', 'content': '6*7?'}]
        >>> request.options.max_tokens
        8
    """
    fields = _check_object(body, name="the body")
    options = _parse_options(fields, known=("messages", "tool_choice", "tools"))
    return ChatRequest(
        messages=parse_messages(fields.get("messages")),
        tools=_parse_tools(fields),
        options=options,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """The body of ``/v1/completions``."""

    prompt: str | tuple[int, ...]
    """Text or token ids to complete."""
    has_token_ids: bool
    """True if the response has the token ids of prompt and completion."""
    options: CompletionOptions


def parse_text_request(body: object) -> TextRequest:
    """Return a request for the completion of a text.

    Raises:
        RequestError: If a field is missing, wrong or not supported.

    Example:
        >>> parse_text_request({"prompt": [6, 14, 7, 15]}).prompt
        (6, 14, 7, 15)
    """
    fields = _check_object(body, name="the body")
    options = _parse_options(fields, known=("prompt", "return_token_ids"))
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        (prompt,) = prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        prompt = tuple(prompt)
    if not prompt or not isinstance(prompt, str | tuple):
        raise RequestError("prompt must be one text or one list of token ids, and not be empty")
    return TextRequest(
        prompt=prompt, has_token_ids=bool(fields.get("return_token_ids")), options=options
    )


def parse_messages(messages: object) -> list[dict[str, Any]]:
    """Return messages in the form that chat templates take.

    Raises:
        RequestError: If there are no messages, or a message is malformed or not supported.
    """
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list with at least one message")
    return [_parse_message(each, index=i) for i, each in enumerate(messages)]


def _parse_options(fields: JsonObject, *, known: Sequence[str]) -> CompletionOptions:
    """Return the options of a request, and refuse the fields that would be ignored."""
    for name, value in fields.items():
        neutral = _NEUTRAL.get(name)
        if (
            name in (*known, *_OPTIONS)
            or name in _WITHOUT_EFFECT | _SET_BY_RUN
            or value is None
            or (neutral is not None and value in neutral)
        ):
            continue
        raise RequestError(f"{name}={value!r} is not supported: leave it out")
    limits = [
        _check_count(fields[name], name=name)
        for name in ("max_completion_tokens", "max_tokens")
        if fields.get(name) is not None
    ]
    stop = fields.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(each, str) and each for each in stop):
        raise RequestError(f"stop is {stop!r}, but must be a text or a list of texts")
    return CompletionOptions(
        max_tokens=min(limits, default=None),
        stop=tuple(stop),
        # 0 asks for the log-probs of the sampled tokens, without alternatives.
        has_logprobs=fields.get("logprobs") is not None and fields["logprobs"] is not False,
        num_ignored=sum(fields.get(name) is not None for name in _SET_BY_RUN),
        is_streamed=bool(fields.get("stream")),
        has_usage=bool(
            _check_object(fields.get("stream_options") or {}, name="stream_options").get(
                "include_usage"
            )
        ),
    )


_OPTIONS = (
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "stop",
    "stream",
    "stream_options",
)
"""Fields of `CompletionOptions`."""
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "response_format": ({"type": "text"},),
    "top_logprobs": (0,),
}
"""Accepted values of fields that are not supported; these values have no effect."""


def _parse_tools(fields: JsonObject) -> list[dict[str, Any]]:
    """Return the schemas of tools, unless the policy must not call one."""
    choice, tools = fields.get("tool_choice"), fields.get("tools") or []
    if choice not in (None, "auto", "none"):
        raise RequestError(f"tool_choice={choice!r} is not supported: it must be auto or none")
    if not isinstance(tools, list):
        raise RequestError("tools must be a list")
    for i, tool in enumerate(tools):
        function = _check_object(tool, name=f"tools[{i}]").get("function")
        name = _check_object(function, name=f"tools[{i}].function").get("name")
        if tool.get("type") != "function" or not isinstance(name, str):
            raise RequestError(f"tools[{i}] must have the type function, and a name")
    return [] if choice == "none" else tools


def _parse_message(message: object, *, index: int) -> dict[str, Any]:
    """Return a message with its content as text."""
    fields = _check_object(message, name=f"messages[{index}]")
    role = fields.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(
            f"messages[{index}].role is {role!r}, but must be one of {', '.join(sorted(_ROLES))}"
        )
    parsed = {name: value for name, value in fields.items() if value is not None}
    # Chat templates know the older name of this role only.
    parsed["role"] = "system" if role == "developer" else role
    parsed["content"] = _join_parts(fields.get("content"), name=f"messages[{index}].content")
    if "tool_calls" in parsed:
        parsed["tool_calls"] = _parse_calls(parsed["tool_calls"], name=f"messages[{index}]")
    return parsed


def _parse_calls(calls: object, *, name: str) -> list[dict[str, Any]]:
    """Return the calls of a message with their arguments as objects, as chat templates take them.

    The API has arguments as text, which the policy may have written.
    """
    if not isinstance(calls, list):
        raise RequestError(f"{name}.tool_calls must be a list")
    parsed = []
    for i, call in enumerate(calls):
        call_name = f"{name}.tool_calls[{i}]"
        fields = _check_object(call, name=call_name)
        function = _check_object(fields.get("function"), name=f"{call_name}.function")
        try:
            arguments = parse_json(function.get("arguments") or "{}")
        except (TypeError, ValueError) as error:
            raise RequestError(f"{call_name}.function.arguments must be JSON: {error}") from error
        parsed.append(
            {
                "id": fields.get("id"),
                "type": "function",
                "function": {"name": function.get("name"), "arguments": arguments},
            }
        )
    return parsed


def _join_parts(content: object, *, name: str) -> str:
    """Return the text of a message's content, which may be a list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        parts = [_check_object(each, name=name) for each in content]
        texts = [each.get("text") for each in parts if each.get("type") == "text"]
        if len(texts) == len(parts) and all(isinstance(each, str) for each in texts):
            return "".join(str(each) for each in texts)
    raise RequestError(f"{name} must be a text, or a list of parts of type text")


def _check_object(value: object, *, name: str) -> JsonObject:
    if not isinstance(value, dict):
        raise RequestError(f"{name} is {value!r}, but must be an object")
    return value


def _check_count(value: object, *, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RequestError(f"{name} is {value!r}, but must be a whole number above 0")
    return value
