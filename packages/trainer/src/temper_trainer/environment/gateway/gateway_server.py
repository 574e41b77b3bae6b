"""Serve an OpenAI-compatible endpoint for the agents of a run. Needs the extra ``agent``."""

import asyncio
import hmac
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from aiohttp import web
from transformers import PreTrainedTokenizerBase

from temper_engine_api.distributed.rendezvous import get_run_token
from temper_trainer.environment.gateway.chat_history import ChatHistory, EncodedPrompt, SampledText
from temper_trainer.environment.gateway.chat_request import (
    CompletionOptions,
    RequestError,
    parse_chat_request,
    parse_text_request,
)
from temper_trainer.environment.gateway.responses import (
    MODEL,
    cut_at_stop,
    make_chat_events,
    make_chat_logprobs,
    make_chat_response,
    make_error,
    make_message,
    make_text_events,
    make_text_logprobs,
    make_text_response,
)
from temper_trainer.environment.protocol import (
    InvalidAnswerError,
    RolloutLimitError,
    SampleFunction,
)
from temper_trainer.environment.tool_calls import CallMarkers, parse_json
from temper_trainer.types import Completion, FinishReason, RefusedRequestError

MAX_BODY_BYTES = 16 << 20
"""Longer requests are refused."""


@dataclass(slots=True, kw_only=True)
class GatewaySession:
    """The endpoint of one agent."""

    base_url: str
    """Address for a client's ``base_url``."""
    api_key: str
    """Secret of this session, for a client's ``api_key``."""
    sample: SampleFunction
    """Samples completions of the agent's rollout."""
    history: ChatHistory
    """Earlier requests of the agent and their completions."""
    markers: CallMarkers
    """Texts around a call of a tool."""
    num_ignored_settings: int = 0
    """Number of sampling parameters that the agent set, and the run has replaced."""
    num_responses: int = 0

    async def complete(
        self, prompt: EncodedPrompt, options: CompletionOptions, *, is_repeated: bool
    ) -> tuple[Completion, SampledText]:
        """Return a completion and its text, whose plain form has no stop text."""
        self.num_ignored_settings += options.num_ignored
        completion = await self.sample(
            prompt.tokens,
            max_tokens=options.max_tokens,
            stop=options.stop,
            is_repeated=is_repeated,
        )
        self.num_responses += 1
        text = self.history.add(prompt, completion)
        if completion.finish_reason == FinishReason.STOP_TEXT:
            text = replace(text, plain=cut_at_stop(text.plain, options.stop))
        return completion, text


class GatewayServer:
    """Listens on one address of this host. Its methods run in one event loop.

    Each session has its own token, derived from the run's token. An agent thus has no access to
    other sessions and to the run's other servers.
    """

    def __init__(
        self,
        *,
        tokenizer: PreTrainedTokenizerBase,
        chat_template: str | None,
        markers: CallMarkers,
        address: str,
    ) -> None:
        """Listen with the first session.

        Args:
            tokenizer: Tokenizer of the policy.
            chat_template: Replaces the tokenizer's own template; None keeps it.
            markers: Texts around a call of a tool.
            address: IPv4 address to listen on.
        """
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._markers = markers
        self._address = address
        self._sessions: dict[str, GatewaySession] = {}
        self._num_sessions = 0
        self._runner: web.AppRunner | None = None
        self._port = 0
        self._starting = asyncio.Lock()

    @asynccontextmanager
    async def open_session(self, sample: SampleFunction) -> AsyncIterator[GatewaySession]:
        """Answer the requests of one agent during the body."""
        async with self._starting:
            if self._runner is None:
                await self._listen()
        self._num_sessions += 1
        name = f"gateway session {self._num_sessions}"
        token = hmac.digest(get_run_token().encode(), name.encode(), "sha256").hex()
        self._sessions[token] = GatewaySession(
            base_url=f"http://{self._address}:{self._port}/v1",
            api_key=token,
            sample=sample,
            history=ChatHistory(tokenizer=self._tokenizer, template=self._chat_template),
            markers=self._markers,
        )
        try:
            yield self._sessions[token]
        finally:
            del self._sessions[token]

    async def close(self) -> None:
        """Stop listening. Idempotent."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _listen(self) -> None:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/v1/chat/completions", self._serve(_complete_chat))
        app.router.add_post("/v1/completions", self._serve(_complete_text))
        app.router.add_get("/v1/models", self._serve(_list_models))
        # A request whose client has gone is cancelled: the agent would not read the completion.
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1)
        await runner.setup()
        listener = socket.create_server((self._address, 0))
        self._port = listener.getsockname()[1]
        await web.SockSite(runner, listener).start()
        self._runner = runner

    def _serve(self, answer: "_Answer") -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Return a handler that finds the session, and writes errors in OpenAI's format."""

        async def handle(request: web.Request) -> web.StreamResponse:
            # Find the session before reading the body, so that strangers cannot send large ones.
            session = self._find_session(request.headers.get("Authorization", ""))
            if session is None:
                message = "the API key belongs to no open session: use the one of this rollout"
                return _refuse(401, message, kind="authentication_error")
            try:
                return await answer(session, request)
            # Clients repeat requests after some other statuses. An error of the sampler has status
            # 500, and ends the run.
            except (
                InvalidAnswerError,
                RefusedRequestError,
                RequestError,
                RolloutLimitError,
            ) as error:
                code = _ERROR_CODES.get(type(error))
                return _refuse(400, str(error), kind="invalid_request_error", code=code)

        return handle

    def _find_session(self, authorization: str) -> "GatewaySession | None":
        """Return the session whose token a header has; None if there is none."""
        given = authorization.removeprefix("Bearer ").encode(errors="surrogateescape")
        # All of them are compared, in constant time, so that the time says nothing about a token.
        sessions = [
            session
            for token, session in self._sessions.items()
            if hmac.compare_digest(token.encode(), given)
        ]
        return sessions[0] if sessions else None


_ERROR_CODES: Mapping[type[Exception], str] = {
    RolloutLimitError: "rollout_limit",
    RefusedRequestError: "refused_request",
}

_Answer = Callable[[GatewaySession, web.Request], Awaitable[web.StreamResponse]]


def _refuse(status: int, message: str, *, kind: str, code: str | None = None) -> web.Response:
    return web.json_response(make_error(message, kind=kind, code=code), status=status)


async def _read_body(request: web.Request) -> object:
    try:
        return parse_json(await request.text())
    # The second one for an unknown charset.
    except (ValueError, LookupError) as error:
        raise RequestError(f"the body is not JSON: {error}") from error


def _is_repeated(request: web.Request) -> bool:
    """Return True if OpenAI's client repeats a request, whose answer may have come too late."""
    return request.headers.get("x-stainless-retry-count", "0") != "0"


async def _complete_chat(session: GatewaySession, request: web.Request) -> web.StreamResponse:
    chat = parse_chat_request(await _read_body(request))
    prompt = session.history.encode_chat(chat.messages, tools=chat.tools)
    completion, text = await session.complete(
        prompt, chat.options, is_repeated=_is_repeated(request)
    )
    message = make_message(
        # The markers may be special tokens.
        text.full if chat.tools and session.markers.start in text.full else text.plain,
        markers=session.markers if chat.tools else None,
        call_id=f"call_{session.num_responses}",
    )
    session.history.add_message(message, after=chat.messages, sampled=text.full)
    response = make_chat_response(
        message,
        response_id=f"chatcmpl-{session.num_responses}",
        num_prompt_tokens=len(prompt.tokens),
        completion=completion,
        logprobs=make_chat_logprobs(completion, session.history.tokenizer)
        if chat.options.has_logprobs
        else None,
    )
    if not chat.options.is_streamed:
        return web.json_response(response)
    return await _stream(request, make_chat_events(response, has_usage=chat.options.has_usage))


async def _complete_text(session: GatewaySession, request: web.Request) -> web.StreamResponse:
    body = parse_text_request(await _read_body(request))
    prompt = session.history.encode_prompt(body.prompt)
    completion, text = await session.complete(
        prompt, body.options, is_repeated=_is_repeated(request)
    )
    response = make_text_response(
        text.plain,
        response_id=f"cmpl-{session.num_responses}",
        prompt_tokens=prompt.tokens,
        completion=completion,
        logprobs=make_text_logprobs(completion, session.history.tokenizer)
        if body.options.has_logprobs
        else None,
        has_token_ids=body.has_token_ids,
    )
    if not body.options.is_streamed:
        return web.json_response(response)
    return await _stream(request, make_text_events(response, has_usage=body.options.has_usage))


async def _stream(
    request: web.Request, events: Sequence[Mapping[str, object]]
) -> web.StreamResponse:
    """Send server-sent events, and `[DONE]` at the end of the stream."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in (*map(json.dumps, events), "[DONE]"):
        await response.write(f"data: {event}\n\n".encode())
    return response


async def _list_models(session: GatewaySession, request: web.Request) -> web.StreamResponse:
    del session, request
    model = {"id": MODEL, "object": "model", "owned_by": "temper"}
    return web.json_response({"object": "list", "data": [model]})
