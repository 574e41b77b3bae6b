"""A taskset and a harness with verifiers' own classes, whose agent runs in the run's process."""

import string
from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.runtimes import ProgramResult

__all__ = ["Chat", "Sums"]


class SumTask(vf.Task[vf.TaskData]):  # type: ignore[type-arg]
    """Asks for a sum; rewards digits in the last answer."""

    @vf.reward
    async def digits(self, trace: Any) -> float:
        """Return the fraction of digits."""
        text = trace.last_reply or ""
        return sum(each in string.digits for each in text) / max(1, len(text))


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    """Sums of small numbers."""

    def load(self) -> Iterable[SumTask]:
        """Yield the tasks."""
        for i in range(16):
            yield SumTask(vf.TaskData(prompt=f"{i} + {i + 1} ="))


class Chat(vf.Harness[vf.HarnessConfig]):
    """Asks the model for an answer, and then to check it."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> ProgramResult:
        """Make two requests through the endpoint of verifiers."""
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        # The default allows 5 s to connect, which is too short on a busy machine.
        async with AsyncOpenAI(
            base_url=endpoint, api_key=secret, max_retries=0, timeout=120
        ) as client:
            for request in ("Check it.", ""):
                response = await client.chat.completions.create(model=ctx.model, messages=messages)
                answer = response.choices[0].message.content or ""
                messages += [
                    {"role": "assistant", "content": answer},
                    {"role": "user", "content": request},
                ]
        return ProgramResult(exit_code=0, stdout="", stderr="")
