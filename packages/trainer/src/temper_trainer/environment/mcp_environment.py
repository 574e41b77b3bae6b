"""Tools of an MCP server, which the policy calls by JSON. Needs the extra ``mcp``."""

import asyncio
import shlex
import shutil
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.types import CallToolResult, TextContent
from transformers import PreTrainedTokenizerBase

from temper_engine_api.errors import TemperError
from temper_engine_api.process_folders import open_temporary_folder
from temper_trainer.config.environment import EnvironmentConfig
from temper_trainer.environment.text_environment import TextEnvironment, TextObservation
from temper_trainer.environment.tool_calls import parse_call
from temper_trainer.process_groups import kill_group, kill_group_on_exit
from temper_trainer.types import Prompt

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream

_START = 'echo $$ >"$0" && exec "$@"'
"""Shell program that writes its process id into a file and becomes the server."""
_START_TIMEOUT_S = 60.0
"""Maximum time for the shell to start, on a busy machine."""


class McpServerError(TemperError, RuntimeError):
    """The MCP server did not start, or ended while it was used."""


class McpServer:
    """A server process, started with the first call and again after it has ended."""

    def __init__(self, command: str) -> None:
        """Store the command, which is split like a line of a shell; the first call starts it."""
        self._command = shlex.split(command)
        self._client: asyncio.Future[Client] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        """Tasks that serve a connection, or have been cancelled and close it."""
        self._closing = asyncio.Event()
        self._parameters: dict[str, str] = {}

    async def call(self, name: str, arguments: Mapping[str, object]) -> CallToolResult:
        """Call a tool.

        Raises:
            McpServerError: If the server cannot be reached; the next call starts it again.
        """
        opened = self._connect()
        client = await asyncio.shield(opened)
        try:
            return await client.call_tool(name, dict(arguments))
        except MCPError as error:
            # This is an error of the connection or the protocol; an error of a tool is a result. In
            # the meantime other calls may have closed this connection and opened a new one.
            if self._client is opened:
                await self.close()
            raise McpServerError(f"the call of {name} failed: {error}") from error

    async def find_parameter(self, tool: str) -> str:
        """Return the name of the first parameter of a tool.

        Raises:
            McpServerError: If the server has no such tool, or it has no parameter.
        """
        if tool not in self._parameters:
            client = await asyncio.shield(self._connect())
            for each in (await client.list_tools()).tools:
                self._parameters[each.name] = next(
                    iter(each.input_schema.get("properties", {})), ""
                )
        if not self._parameters.get(tool):
            raise McpServerError(
                f"the MCP server has no tool {tool!r} with a parameter; it has "
                f"{', '.join(self._parameters)}: correct environment.arguments.tool."
            )
        return self._parameters[tool]

    async def close(self) -> None:
        """End the process. Idempotent."""
        self._client = None
        self._closing.set()
        # Shielded, because a task that is cancelled once more would not close its connection.
        await asyncio.shield(asyncio.gather(*self._tasks, return_exceptions=True))

    def _connect(self) -> "asyncio.Future[Client]":
        """Return the client, which may not be connected yet. A caller must not cancel it."""
        if self._client is None:
            self._closing = asyncio.Event()
            self._client = asyncio.get_running_loop().create_future()
            # The task that opens a connection must also close it, and rollouts come and go.
            task = asyncio.create_task(self._serve(self._client, self._closing))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return self._client

    async def _serve(self, opened: "asyncio.Future[Client]", closing: asyncio.Event) -> None:
        """Keep the connection open until it is closed."""
        try:
            async with Client(_open_streams(self._command)) as client:
                opened.set_result(client)
                try:
                    await closing.wait()
                finally:
                    # Before the connection is closed, which takes time: all tasks are cancelled
                    # before an evaluation, whose calls need a new server.
                    self._forget(opened)
        # Errors of the library come in groups of any type. They are raised where a call waits.
        except Exception as error:
            if opened.done():
                raise
            message = (
                f"the MCP server {shlex.join(self._command)!r} did not start: {_describe(error)}. "
                "What it printed itself is in the output of this process."
            )
            opened.set_exception(McpServerError(message))
            opened.exception()  # the waiters may have been cancelled
        finally:
            opened.cancel()  # no effect if it was opened
            self._forget(opened)

    def _forget(self, opened: "asyncio.Future[Client]") -> None:
        """Let the next call start the server again, unless another one was started."""
        if self._client is opened:
            self._client = None


class McpEnvironment(TextEnvironment):
    """The tools of a server.

    Between the markers of a call, the policy writes ``{"name": ..., "arguments": {...}}``, or with
    `tool` the only argument of that tool, and reads the text of the result.
    """

    def __init__(
        self,
        *,
        config: EnvironmentConfig,
        tokenizer: PreTrainedTokenizerBase,
        server: McpServer,
        owns_server: bool,
        tool: str | None,
    ) -> None:
        """Create the environment of one rollout.

        Args:
            config: Settings of the run's environment.
            tokenizer: Tokenizer of the policy.
            server: The server.
            owns_server: True if the server ends with the rollout.
            tool: See `make_factory`.
        """
        super().__init__(config=config, tokenizer=tokenizer)
        self._server = server
        self._owns_server = owns_server
        self._tool = tool

    @classmethod
    def make_factory(
        cls,
        *,
        config: EnvironmentConfig,
        tokenizer: PreTrainedTokenizerBase,
        command: str,
        tool: str | None = None,
        server_per_rollout: bool = False,
    ) -> "McpFactory":
        """Return what makes the environments of a run.

        Args:
            config: Settings of the run's environment.
            tokenizer: Tokenizer of the policy.
            command: Starts the server, which talks over its standard input and output.
            tool: Tool that every call means, whose only argument is the text of the call; None
                expects calls in JSON.
            server_per_rollout: True starts a server for each rollout, because it keeps state.
        """

        def make(server: McpServer, *, owns_server: bool) -> McpEnvironment:
            return cls(
                config=config,
                tokenizer=tokenizer,
                server=server,
                owns_server=owns_server,
                tool=tool,
            )

        return McpFactory(make, command=command, is_shared=not server_per_rollout)

    async def open(self, prompt: Prompt) -> str:
        """Start a rollout."""
        del prompt
        return ""

    async def respond(self, text: str) -> TextObservation:
        """Call the tool that the completion names; without a call the rollout ends."""
        start = text.rfind(self.config.call_start)
        if start < 0:
            return TextObservation(is_done=True)
        call = text[start + len(self.config.call_start) :] if self.config.call_start else text
        if self._tool is not None:
            parameter = await self._server.find_parameter(self._tool)
            result = await self._server.call(self._tool, {parameter: call})
        else:
            try:
                name, arguments = parse_call(call)
            except ValueError as error:
                return _report(f"error: {error}", is_failed=True)
            result = await self._server.call(name, arguments)
        parts = [each.text for each in result.content if isinstance(each, TextContent)]
        return _report("\n".join(parts), is_failed=bool(result.is_error))

    async def close(self) -> None:
        """End the server of this rollout."""
        if self._owns_server:
            await self._server.close()


class McpFactory:
    """Makes the environments of a run, and stops their shared server."""

    def __init__(
        self, make: Callable[..., McpEnvironment], *, command: str, is_shared: bool
    ) -> None:
        """Start no server yet."""
        self._make = make
        self._command = command
        self._shared = McpServer(command) if is_shared else None

    def __call__(self) -> McpEnvironment:
        """Return the environment of one rollout."""
        server = self._shared or McpServer(self._command)
        return self._make(server, owns_server=self._shared is None)

    async def close(self) -> None:
        """End the shared server."""
        if self._shared is not None:
            await self._shared.close()


@asynccontextmanager
async def _open_streams(command: Sequence[str]) -> AsyncIterator[tuple[Any, Any]]:
    """Start a server and yield its streams. Its group is killed afterwards, or with this process.

    A server in a call that blocks does not notice the end of its standard input.

    Raises:
        McpServerError: If the server is not a program, or its shell does not start it.
    """
    program = command[0] if command else ""
    if shutil.which(program) is None:  # the shell would only close the connection
        raise McpServerError(f"{program!r} is not a program in PATH or an executable file")
    with open_temporary_folder("mcp") as folder, ExitStack() as ending:
        # The library makes a process group for the server, but keeps its id to itself.
        file = folder / "process"
        arguments = ["-c", _START, str(file), *command]
        server = StdioServerParameters(command="/bin/sh", args=arguments)
        async with stdio_client(server) as streams:
            group = await _read_process_id(file, incoming=streams[0])
            ending.enter_context(kill_group_on_exit(group))
            ending.callback(kill_group, group)
            yield streams


async def _read_process_id(file: Path, *, incoming: "MemoryObjectReceiveStream[Any]") -> int:
    """Return the process id that the shell writes; `incoming` ends if the shell ends before."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        # The statistics show the end without taking a message from the stream. Before the file is
        # read, because a server may write its id and end at once.
        has_ended = incoming.statistics().open_send_streams == 0
        if file.exists() and (text := file.read_text()).endswith("\n"):
            return int(text)
        if has_ended or time.monotonic() > deadline:
            limit = "" if has_ended else f" within {_START_TIMEOUT_S:g} s"
            raise McpServerError(f"its shell did not write its process id to {file}{limit}")
        await asyncio.sleep(0.01)


def _describe(error: Exception) -> str:
    """Return the text of an error, which may be the only one of nested groups."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        (error,) = error.exceptions
    return str(error) if isinstance(error, McpServerError) else repr(error)


def _report(text: str, *, is_failed: bool) -> TextObservation:
    return TextObservation(text=text, metrics={"tool/calls": 1.0, "tool/failed": float(is_failed)})
