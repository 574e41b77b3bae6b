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
from dataclasses import dataclass, field
from functools import partial

import openai
from anyio.from_thread import start_blocking_portal
from openai.types.chat import ChatCompletion

from temper_trainer.config.judge import JudgeConfig
from temper_trainer.progress import advance_progress
from temper_trainer.reward.judge_answers import (
    JudgeAnswerError,
    Messages,
    build_messages,
    parse_score,
)
from temper_trainer.reward.judge_endpoint import NO_KEY, read_api_key
from temper_trainer.reward.reward_calls import FailureKind, Item, Outcome
from temper_trainer.types import Prompt

MAX_CACHED_SCORES = 200_000
"""Scores that a judge remembers, about 30 MB; the oldest ones are dropped."""


@dataclass(slots=True)
class _Usage:
    """Counts of one batch."""

    requests: int = 0
    """HTTP requests, including retries."""
    calls: int = 0
    """Completions that were sent; each takes one request and its retries."""
    cached: int = 0
    """Completions whose score was known, or that equal another one of the batch."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    latencies_s: list[float] = field(default_factory=list)
    """Time of each answered call, including its retries."""


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
        self._usage = _Usage()
        self._total_cost_usd = 0.0
        self._stack = ExitStack()
        # A thread with an event loop: one loop for all steps, so that connections are reused.
        self._portal = self._stack.enter_context(start_blocking_portal())
        self._client = openai.AsyncOpenAI(
            base_url=config.base_url,
            api_key=read_api_key(config, name=name) or NO_KEY,
            timeout=config.request_timeout_s,
            max_retries=config.max_retries,
            # The library does not tell how often it retried a request that failed in the end.
            http_client=openai.DefaultAsyncHttpxClient(
                event_hooks={"request": [self._count_request]}
            ),
        )

    def run(self, items: Sequence[Item], *, max_failures: int) -> list[Outcome]:
        """Return one outcome per item, in order; those of the calls made if too many failed."""
        self._usage = _Usage()
        outcomes = self._portal.call(partial(self._run, items, max_failures=max_failures))
        self._total_cost_usd += self._compute_cost_usd()
        return outcomes

    def close(self) -> None:
        """Close the connections and end the thread."""
        with self._stack:
            self._portal.call(self._client.close)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last ``run``, and the cost of all."""
        usage, latencies = self._usage, self._usage.latencies_s
        values: dict[str, float] = {
            "requests": usage.requests,
            "retries": usage.requests - usage.calls,
            "cached": usage.cached,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cost_usd": self._compute_cost_usd(),
            "total_cost_usd": self._total_cost_usd,
        }
        if latencies:
            values["latency_mean_s"] = sum(latencies) / len(latencies)
            values["latency_max_s"] = max(latencies)
        return {f"judge/{self._name}/{key}": float(value) for key, value in values.items()}

    async def _count_request(self, _: object) -> None:
        self._usage.requests += 1

    def _compute_cost_usd(self) -> float:
        prices = self._config
        return (
            self._usage.prompt_tokens * prices.usd_per_million_prompt_tokens
            + self._usage.completion_tokens * prices.usd_per_million_completion_tokens
        ) / 1e6

    async def _run(self, items: Sequence[Item], *, max_failures: int) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        semaphore = asyncio.Semaphore(self._config.max_concurrency)
        tasks: list[asyncio.Task[None]] = []

        def add(indices: Sequence[int], outcome: Outcome) -> None:
            outcomes.update(dict.fromkeys(indices, outcome))
            advance_progress("rewards", len(indices))
            if sum(each.kind is not None for each in outcomes.values()) > max_failures:
                # The run stops anyway, so the other calls would only cost time and money.
                for task in tasks:
                    task.cancel()

        async def call(messages: Messages, *, indices: Sequence[int]) -> None:
            prompt, _ = items[indices[0]]
            async with semaphore:
                add(indices, await self._call(messages, prompt=prompt))

        by_key: dict[bytes, tuple[Messages, list[int]]] = {}
        for i, (prompt, text) in enumerate(items):
            try:
                messages = build_messages(self._config, prompt, text)
            except KeyError as error:
                problem = f"the prompt has no field {error} in extra, which the template needs"
                add([i], _fail(FailureKind.EXCEPTION, problem, prompt=prompt))
                continue
            by_key.setdefault(_hash_messages(messages), (messages, []))[1].append(i)
        async with asyncio.TaskGroup() as group:
            for key, (messages, indices) in by_key.items():
                if key in self._scores:
                    self._usage.cached += len(indices)
                    add(indices, Outcome(reward=self._scores[key]))
                else:
                    self._usage.cached += len(indices) - 1
                    tasks.append(group.create_task(call(messages, indices=indices)))
        return [outcome for _, outcome in sorted(outcomes.items(), key=lambda pair: pair[0])]

    async def _call(self, messages: Messages, *, prompt: Prompt) -> Outcome:
        """Score one completion; a failure becomes an outcome."""
        config, started = self._config, time.monotonic()
        try:
            self._usage.calls += 1
            async with asyncio.timeout(config.timeout_s):
                answer = await self._request(messages)
            score = parse_score(answer, config=config)
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
        self._usage.latencies_s.append(time.monotonic() - started)
        self._remember(_hash_messages(messages), score)
        return Outcome(reward=score)

    async def _request(self, messages: Messages) -> str:
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
            self._usage.prompt_tokens += completion.usage.prompt_tokens
            self._usage.completion_tokens += completion.usage.completion_tokens
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


def _hash_messages(messages: Sequence[Mapping[str, str]]) -> bytes:
    return hashlib.sha256(json.dumps(messages).encode()).digest()


def _fail(kind: FailureKind, problem: str, *, prompt: Prompt, trace: str = "") -> Outcome:
    message = f"{problem} (prompt {prompt.prompt_id}, {prompt.location})"
    return Outcome(kind=kind, message=message, trace=trace)
