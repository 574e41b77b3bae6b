"""Write responses in the format of OpenAI's API."""

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from temper_trainer.environment.tool_calls import CallMarkers
from temper_trainer.types import Completion, FinishReason

MODEL = "policy"
"""Name of the model; requests may use any."""


def make_chat_response(
    message: Mapping[str, Any],
    *,
    response_id: str,
    num_prompt_tokens: int,
    completion: Completion,
    logprobs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the body of a chat completion."""
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": "tool_calls" if "tool_calls" in message else get_finish_reason(completion),
        "logprobs": logprobs,
    }
    return {
        "id": response_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [choice],
        "usage": make_usage(num_prompt_tokens, completion=completion),
    }


def make_text_response(
    text: str,
    *,
    response_id: str,
    prompt_tokens: Sequence[int],
    completion: Completion,
    logprobs: Mapping[str, Any] | None,
    has_token_ids: bool,
) -> dict[str, Any]:
    """Return the body of a completion of a text."""
    choice: dict[str, Any] = {
        "index": 0,
        "text": text,
        "finish_reason": get_finish_reason(completion),
        "logprobs": logprobs,
    }
    if has_token_ids:
        choice |= {"prompt_token_ids": prompt_tokens, "token_ids": list(completion.tokens)}
    return {
        "id": response_id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [choice],
        "usage": make_usage(len(prompt_tokens), completion=completion),
    }


def make_text_events(response: Mapping[str, Any], *, has_usage: bool) -> list[dict[str, Any]]:
    """Return a completion of a text as the events of a stream, like `make_chat_events`."""
    beginning = {name: value for name, value in response.items() if name != "usage"}
    if not has_usage:
        return [beginning]
    return [beginning, {**beginning, "choices": [], "usage": response["usage"]}]


def make_text_logprobs(
    completion: Completion, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Sequence[object] | None]:
    """Return the log-prob per token in the format of text completions."""
    tokens = [tokenizer.decode([token]) for token in completion.tokens]
    return {
        "tokens": tokens,
        "token_logprobs": list(completion.rollout_logprobs),
        "top_logprobs": None,
        "text_offset": list(itertools.accumulate(map(len, tokens[:-1]), initial=0)),
    }


def make_chat_events(response: Mapping[str, Any], *, has_usage: bool) -> list[dict[str, Any]]:
    """Return a chat completion as the events of a stream.

    It is complete before its first event, because the sampler returns complete completions.
    """
    (choice,) = response["choices"]
    beginning = {name: response[name] for name in ("id", "created", "model")}
    beginning |= {"object": "chat.completion.chunk"}
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        calls = enumerate(delta["tool_calls"])
        delta["tool_calls"] = [{"index": i, **call} for i, call in calls]

    def make_event(delta: Mapping[str, Any], **fields: object) -> dict[str, Any]:
        return {
            **beginning,
            "choices": [{"index": 0, "delta": delta, "finish_reason": None} | fields],
        }

    events = [
        make_event({"role": delta.pop("role"), "content": ""}),
        make_event(delta, logprobs=choice["logprobs"]),
        make_event({}, finish_reason=choice["finish_reason"]),
    ]
    if has_usage:
        events.append({**beginning, "choices": [], "usage": response["usage"]})
    return events


def make_message(text: str, *, markers: CallMarkers | None, call_id: str) -> dict[str, Any]:
    """Return the message of a completion, with the calls of tools that its text has.

    A text with a malformed call is returned as it is, so that the agent can answer it.

    Args:
        text: Text of the completion.
        markers: Texts around a call; None if the policy may call no tool.
        call_id: Beginning of the ids of calls.
    """
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if markers is None:
        return message
    try:
        content, calls = markers.split_calls(text)
    except ValueError:
        return message
    if not calls:
        return message
    return {
        "role": "assistant",
        "content": content.strip() or None,
        "tool_calls": [
            {
                "id": f"{call_id}_{i}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for i, (name, arguments) in enumerate(calls)
        ],
    }


def get_finish_reason(completion: Completion) -> str:
    """Return the finish reason by its name in OpenAI's API."""
    return "length" if completion.finish_reason == FinishReason.MAX_TOKENS else "stop"


def make_usage(num_prompt_tokens: int, *, completion: Completion) -> dict[str, int]:
    """Return the numbers of tokens."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": len(completion.tokens),
        "total_tokens": num_prompt_tokens + len(completion.tokens),
    }


def make_chat_logprobs(
    completion: Completion, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Sequence[Mapping[str, Any]]]:
    """Return the log-prob per token, under the sampler's distribution with temperature."""
    return {
        "content": [
            {
                "token": tokenizer.decode([token]),
                "logprob": logprob,
                "bytes": None,
                "top_logprobs": [],
            }
            for token, logprob in zip(completion.tokens, completion.rollout_logprobs, strict=True)
        ]
    }


def make_error(message: str, *, kind: str, code: str | None = None) -> dict[str, Any]:
    """Return the body of an error."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Return a text without the stop text at its end, as OpenAI's API does.

    Example:
        >>> cut_at_stop("4 + 4 =", ("=", "?"))
        '4 + 4 '
    """
    end = next((each for each in stop if text.endswith(each)), "")
    return text.removesuffix(end)
