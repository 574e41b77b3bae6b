"""Agents that use an OpenAI client: programs or functions. Needs the extra ``agent``."""

import asyncio
import contextlib
import json
import os
import shlex
import subprocess
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import IO

from transformers import PreTrainedTokenizerBase

from temper_engine_api.errors import TemperError
from temper_trainer.concurrency import DaemonThreads
from temper_trainer.config.environment import EnvironmentConfig
from temper_trainer.config.run import LOOPBACK
from temper_trainer.environment.gateway.gateway_server import GatewayServer, GatewaySession
from temper_trainer.environment.gateway.responses import MODEL
from temper_trainer.environment.protocol import AgentOutcome, SampleFunction
from temper_trainer.environment.tool_calls import CallMarkers, parse_json
from temper_trainer.process_groups import has_ended, kill_group, kill_group_on_exit
from temper_trainer.settings.names import import_object
from temper_trainer.types import Prompt

INHERITED_VARIABLES = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR")
"""Variables that an agent's program gets from the run; other variables may be secrets."""
_KEPT_BYTES = 1 << 14
"""Maximum number of bytes kept from each output of a program."""

_threads = DaemonThreads("agent")


class AgentFailedError(TemperError, RuntimeError):
    """The program of an agent ended with an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTask:
    """Prompt and endpoint of an agent's rollout.

    Example:
        >>> prompt = Prompt(prompt_id=0, text="6*7=", tokens=(6, 14, 7, 15), answer="42")
        >>> task = AgentTask(
        ...     prompt=prompt, base_url="http://127.0.0.1:8000/v1", api_key="...", model="policy"
        ... )
        >>> task.question
        '6*7='
    """

    prompt: Prompt
    """Row of the data."""
    base_url: str
    """Address for the ``base_url`` of a client."""
    api_key: str
    """Secret of this rollout, for the ``api_key`` of a client."""
    model: str
    """Name of the model; the endpoint takes any."""

    @property
    def question(self) -> str:
        """Prompt of the row, before templates."""
        return self.prompt.question or self.prompt.text


AgentFunction = Callable[[AgentTask], Awaitable[float | None] | float | None]
"""Runs an agent and returns a reward, which is added to the rollout's; None is 0."""


class OpenAiAgent:
    """An agent whose requests come through the gateway."""

    def __init__(self, run: "Callable[[AgentTask], Awaitable[float]]", *, gateway: GatewayServer):
        """Create the agent of one rollout."""
        self._run = run
        self._gateway = gateway

    @classmethod
    def make_factory(
        cls,
        *,
        config: EnvironmentConfig,
        tokenizer: PreTrainedTokenizerBase,
        chat_template: str | None = None,
        address: str = LOOPBACK,
        command: str | None = None,
        function: str | None = None,
        variables: str = "",
    ) -> "AgentFactory":
        """Return the factory of a run's agents.

        Args:
            config: Settings of the environment, with the texts around a call of a tool.
            tokenizer: Tokenizer of the policy.
            chat_template: Chat template of the run; None is that of the tokenizer.
            address: IPv4 address on which the endpoint listens.
            command: Starts an agent, whose variables name the endpoint.
            function: Import path of a function that runs an agent; in place of a command.
            variables: Names of variables of this process that the command gets, separated by
                commas.

        Raises:
            ConfigError: If the function cannot be imported.
        """
        gateway = GatewayServer(
            tokenizer=tokenizer,
            chat_template=chat_template,
            markers=CallMarkers(start=config.call_start, end=config.call_end),
            address=address,
        )
        if function is not None:
            run = _wrap_function(import_object(function, key="environment.arguments.function"))
            return AgentFactory(lambda: cls(run, gateway=gateway), gateway=gateway)
        assert command is not None
        names = [each.strip() for each in variables.split(",") if each.strip()]
        program = AgentProgram(shlex.split(command), variables=names)
        return AgentFactory(
            lambda: cls(program.run, gateway=gateway), gateway=gateway, program=program
        )

    async def run_agent(self, prompt: Prompt, *, sample: SampleFunction) -> AgentOutcome:
        """Run the agent with an endpoint of its own."""
        async with self._gateway.open_session(sample) as session:
            reward = await self._run(_make_task(prompt, session=session))
            return AgentOutcome(
                reward=reward,
                metrics={"agent/ignored_settings": float(session.num_ignored_settings)},
            )


class AgentFactory:
    """Makes the agents of a run, and stops their shared endpoint."""

    def __init__(
        self,
        make: Callable[[], OpenAiAgent],
        *,
        gateway: GatewayServer,
        program: "AgentProgram | None" = None,
    ) -> None:
        """Listen with the first agent."""
        self._make = make
        self._gateway = gateway
        self._program = program

    def __call__(self) -> OpenAiAgent:
        """Return the agent of one rollout."""
        return self._make()

    async def close(self) -> None:
        """Stop listening, and wait for the end of all programs."""
        await self._gateway.close()
        if self._program is not None:
            await self._program.close()


@dataclass(frozen=True, slots=True)
class AgentProgram:
    """A program that runs an agent. It is killed with its children when the rollout ends."""

    command: list[str]
    variables: list[str]
    """Names of variables that it gets from this process, besides `INHERITED_VARIABLES`."""
    _ends: set["Future[int]"] = field(default_factory=set)
    """Statuses of processes that were killed and are being waited for."""

    async def run(self, task: AgentTask) -> float:
        """Run the program, and return the reward that it printed.

        Raises:
            AgentFailedError: If it ends with another status than 0.
        """
        # Encode the task before the program starts: one that JSON cannot hold fails the rollout.
        line = _encode_task(task)
        # asyncio is not used, because it reaps a process as soon as it ends. The process id may
        # then belong to another process, and killing the process group would be unsafe.
        process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self._make_variables(task),
            start_new_session=True,
        )
        async with asyncio.TaskGroup() as tasks:
            # Read both while the program runs: it would block if a pipe were full.
            streams = [
                tasks.create_task(_read_end(each)) for each in (process.stdout, process.stderr)
            ]
            try:
                with kill_group_on_exit(process.pid):
                    _threads.start(_write, process.stdin, line)
                    await _threads.call(has_ended, process, is_waiting=True)
            finally:
                # Also kill its children, which may keep its streams open.
                kill_group(process.pid)
                end = _threads.start(process.wait)
                self._ends.add(end)
                end.add_done_callback(self._ends.discard)
        output, errors = (each.result() for each in streams)
        # The program has ended, so this returns at once. Awaiting `end` instead would cancel it
        # together with this rollout.
        if status := process.wait():
            raise AgentFailedError(
                f"the agent of prompt {task.prompt.prompt_id} ({task.prompt.location}) ended with "
                f"status {status}; its errors end with: {errors.strip()[-2000:]}"
            )
        return _parse_reward(output)

    async def close(self) -> None:
        """Wait for programs that were killed because their rollouts were cancelled."""
        await asyncio.gather(*map(asyncio.wrap_future, set(self._ends)))

    def _make_variables(self, task: AgentTask) -> dict[str, str]:
        names = (*INHERITED_VARIABLES, *self.variables)
        return {name: os.environ[name] for name in names if name in os.environ} | {
            "OPENAI_BASE_URL": task.base_url,
            "OPENAI_API_KEY": task.api_key,
            "OPENAI_MODEL": task.model,
        }


def _make_task(prompt: Prompt, *, session: GatewaySession) -> AgentTask:
    return AgentTask(prompt=prompt, base_url=session.base_url, api_key=session.api_key, model=MODEL)


def _wrap_function(function: AgentFunction) -> Callable[[AgentTask], Awaitable[float]]:
    """Return a coroutine function; a function that blocks runs in a thread."""

    async def run(task: AgentTask) -> float:
        reward = await _threads.call_or_await(function, task)
        return 0.0 if reward is None else float(reward)

    return run


def _encode_task(task: AgentTask) -> bytes:
    """Return the task as one line of JSON."""
    line = json.dumps(
        {
            "prompt_id": task.prompt.prompt_id,
            "prompt": task.question,
            "extra": dict(task.prompt.extra),
        },
        default=str,
    )
    return line.encode() + b"\n"


def _write(stream: IO[bytes] | None, line: bytes) -> None:
    """Write a line to a program; do nothing if the program has closed its input."""
    assert stream is not None
    # Closing the stream writes what is left in its buffer.
    with contextlib.suppress(BrokenPipeError), stream:
        stream.write(line)


async def _read_end(stream: IO[bytes] | None) -> str:
    """Read a stream to its end, and return its last bytes."""
    assert stream is not None
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), stream
    )
    kept: deque[bytes] = deque()
    num_bytes = 0
    try:
        while part := await reader.read(_KEPT_BYTES):
            kept.append(part)
            num_bytes += len(part)
            while num_bytes - len(kept[0]) >= _KEPT_BYTES:
                num_bytes -= len(kept.popleft())
    finally:
        transport.close()
    return b"".join(kept).decode("utf-8", errors="replace")


def _parse_reward(output: str) -> float:
    """Return the reward in the last line of a program's output; 0 if it has none.

    Example:
        >>> _parse_reward('{"reward": 0.5}')
        0.5
        >>> _parse_reward("[" * 2000)  # too deep for Python's parser
        0.0
    """
    lines = output.strip().splitlines()
    try:
        last = parse_json(lines[-1]) if lines else None
        reward = last.get("reward") if isinstance(last, dict) else None
        return float(reward) if isinstance(reward, int | float) else 0.0
    except (ValueError, OverflowError):  # the last line is no JSON, or the reward too large
        return 0.0
