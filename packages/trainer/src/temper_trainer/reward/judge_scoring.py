"""Score completions with a judge: concurrent requests, retries, a cache, and their metrics.

Imported only if a judge is configured, because it needs the extra ``judge``.
"""

import asyncio
import hashlib
import json
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, replace

import openai
from anyio.from_thread import start_blocking_portal
from openai.types.chat import ChatCompletion

from temper_trainer.concurrency import PriorityLimit
from temper_trainer.config.judge import JudgeConfig
from temper_trainer.progress import advance_progress
from temper_trainer.reward.judge_answers import (
    JudgeAnswerError,
    Messages,
    build_messages,
    parse_score,
)
from temper_trainer.reward.judge_endpoint import NO_KEY, read_api_key
from temper_trainer.reward.reward_calls import (
    CallRound,
    FailureKind,
    Item,
    JudgeUsage,
    Outcome,
)
from temper_trainer.types import Prompt

MAX_CACHED_SCORES = 200_000
"""Scores that a judge remembers, about 30 MB; the oldest ones are dropped."""


@dataclass(slots=True)
class _Counts:
    """Counts of one call, while it is made."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


_current_counts: ContextVar[_Counts] = ContextVar("_current_counts")
"""Counts of the call whose task runs: requests are counted where the library sends them."""


@dataclass(slots=True)
class _SharedCall:
    """A call whose score several equal completions wait for."""

    task: "asyncio.Task[Outcome]"
    num_waiting: int = 0


class JudgeScoring:
    """A judge that is ready to score; ``close`` ends its connections."""

    def __init__(self, config: JudgeConfig, *, name: str) -> None:
        """Open the judge ``reward.judges.NAME``; nothing is sent yet.

        Raises:
            ConfigError: If the environment variable of its key is not set.
        """
        self._config = config
        self._name = name
        self._scores: dict[bytes, float] = {}
        self._open: dict[bytes, _SharedCall] = {}
        self._total_cost_usd = 0.0
        self._limit = PriorityLimit(config.max_concurrency)
        self._stack = ExitStack()
        # A thread with an event loop: one loop for all steps, so that connections are reused.
        self._portal = self._stack.enter_context(start_blocking_portal())
        self._client = openai.AsyncOpenAI(
            base_url=config.base_url,
            api_key=read_api_key(config, name=name) or NO_KEY,
            timeout=config.request_timeout_s,
            max_retries=config.max_retries,
            # The library does not tell how often it retried a request that failed in the end.
            http_client=openai.DefaultAsyncHttpxClient(event_hooks={"request": [_count_request]}),
        )

    async def score(self, item: Item, *, calls: CallRound, priority: tuple[int, int]) -> Outcome:
        """Score one completion with one request and its retries, or from the cache."""
        del calls  # only functions are called more often at a time if they hang
        future = self._portal.start_task_soon(self._find_score, item, priority)
        outcome = await asyncio.wrap_future(future)
        advance_progress("rewards")
        return outcome

    def close(self) -> None:
        """Close the connections and end the thread."""
        with self._stack:
            self._portal.call(self._client.close)

    def measure(self, usages: Sequence[JudgeUsage]) -> dict[str, float]:
        """Return metrics for some scores, and the total cost in this run."""
        latencies = [each.latency_s for each in usages if each.latency_s is not None]
        num_requests, num_calls = (
            sum(each.requests for each in usages),
            sum(each.calls for each in usages),
        )
        values: dict[str, float] = {
            "requests": num_requests,
            "retries": num_requests - num_calls,
            "cached": len(usages) - num_calls,
            "prompt_tokens": sum(each.prompt_tokens for each in usages),
            "completion_tokens": sum(each.completion_tokens for each in usages),
            "cost_usd": sum(map(self._compute_cost_usd, usages)),
            "total_cost_usd": self._total_cost_usd,
        }
        if latencies:
            values["latency_mean_s"] = sum(latencies) / len(latencies)
            values["latency_max_s"] = max(latencies)
        return {f"judge/{self._name}/{key}": float(value) for key, value in values.items()}

    def _compute_cost_usd(self, usage: JudgeUsage) -> float:
        prices = self._config
        return (
            usage.prompt_tokens * prices.usd_per_million_prompt_tokens
            + usage.completion_tokens * prices.usd_per_million_completion_tokens
        ) / 1e6

    async def _find_score(self, item: Item, priority: tuple[int, int]) -> Outcome:
        """Return a known score, or one from a call, which equal completions share."""
        prompt, text = item
        try:
            messages = build_messages(self._config, prompt, text)
        except KeyError as error:
            problem = f"the prompt has no field {error} in extra, which the template needs"
            return _fail(FailureKind.EXCEPTION, problem, prompt=prompt)
        key = _hash_messages(messages)
        if key in self._scores:
            return Outcome(reward=self._scores[key], usage=JudgeUsage())
        is_first = key not in self._open
        if is_first:
            task = asyncio.create_task(self._call(messages, prompt=prompt, priority=priority))
            self._open[key] = _SharedCall(task)
            task.add_done_callback(lambda _: self._open.pop(key))
        shared = self._open[key]
        shared.num_waiting += 1
        try:
            outcome = await asyncio.shield(shared.task)
        finally:
            shared.num_waiting -= 1
            if shared.num_waiting == 0:
                shared.task.cancel()  # no effect if it is done
        return outcome if is_first else replace(outcome, usage=JudgeUsage())

    async def _call(
        self, messages: Messages, *, prompt: Prompt, priority: tuple[int, int]
    ) -> Outcome:
        """Score one completion; a failure becomes an outcome."""
        async with self._limit.acquire(priority):
            counts, started = _Counts(), time.monotonic()
            _current_counts.set(counts)
            outcome = await self._try_call(messages, counts=counts, prompt=prompt)
        is_scored = outcome.kind is None
        usage = JudgeUsage(
            requests=counts.requests,
            calls=1,
            prompt_tokens=counts.prompt_tokens,
            completion_tokens=counts.completion_tokens,
            latency_s=time.monotonic() - started if is_scored else None,
        )
        self._total_cost_usd += self._compute_cost_usd(usage)
        if outcome.reward is not None:
            self._remember(_hash_messages(messages), outcome.reward)
        return replace(outcome, usage=usage)

    async def _try_call(self, messages: Messages, *, counts: _Counts, prompt: Prompt) -> Outcome:
        config = self._config
        try:
            async with asyncio.timeout(config.timeout_s):
                answer = await self._request(messages, counts=counts)
            return Outcome(reward=parse_score(answer, config=config))
        except (TimeoutError, openai.APITimeoutError) as error:
            setting = "request_timeout_s" if isinstance(error, openai.OpenAIError) else "timeout_s"
            problem = (
                f"took longer than reward.judges.{self._name}.{setting} = "
                f"{getattr(config, setting):g}"
            )
            return _fail(FailureKind.TIMEOUT, problem, prompt=prompt)
        except JudgeAnswerError as error:
            return _fail(FailureKind.NOT_FINITE, str(error), prompt=prompt)
        # The library lets the decoder's error through if the body of an answer is not JSON.
        except (openai.OpenAIError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
            return _fail(
                FailureKind.EXCEPTION, problem, prompt=prompt, trace=traceback.format_exc()
            )

    async def _request(self, messages: Messages, *, counts: _Counts) -> str:
        """Return the text of the judge's answer, and count its tokens."""
        config = self._config
        fields: dict[str, object] = {"max_completion_tokens": config.max_tokens}
        if config.temperature is not None:
            fields["temperature"] = config.temperature
        completion: object = await self._client.chat.completions.create(
            model=config.model,
            messages=messages,  # type: ignore[arg-type]  # plain dicts of role and content
            extra_body={**fields, **config.request_arguments},
        )
        # The library checks neither the type nor the fields of what an endpoint sends.
        if not isinstance(completion, ChatCompletion) or not completion.choices:
            raise JudgeAnswerError(f"the endpoint sent {completion!r:.160}, without an answer")
        if completion.usage is not None:
            counts.prompt_tokens += completion.usage.prompt_tokens
            counts.completion_tokens += completion.usage.completion_tokens
        choice = completion.choices[0]
        if not choice.message.content:
            raise JudgeAnswerError(
                f"the judge gave an empty answer with finish_reason {choice.finish_reason!r}; if "
                f"it is length, raise reward.judges.{self._name}.max_tokens"
            )
        return choice.message.content

    def _remember(self, key: bytes, score: float) -> None:
        if len(self._scores) >= MAX_CACHED_SCORES:
            del self._scores[next(iter(self._scores))]
        self._scores[key] = score


async def _count_request(_: object) -> None:
    _current_counts.get().requests += 1


def _hash_messages(messages: Sequence[Mapping[str, str]]) -> bytes:
    return hashlib.sha256(json.dumps(messages).encode()).digest()


def _fail(kind: FailureKind, problem: str, *, prompt: Prompt, trace: str = "") -> Outcome:
    message = f"{problem} (prompt {prompt.prompt_id}, {prompt.location})"
    return Outcome(kind=kind, message=message, trace=trace)
