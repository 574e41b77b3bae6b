"""The OpenAI-compatible endpoint, with OpenAI's own client."""

import asyncio
import contextlib
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import httpx
import pytest
from openai import AsyncOpenAI, AuthenticationError, BadRequestError, InternalServerError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from temper_engine_api.errors import WeightError
from temper_trainer.config.environment import EnvironmentConfig
from temper_trainer.config.rollout import SamplingConfig
from temper_trainer.environment.agent_environment import AgentFactory, AgentTask, OpenAiAgent
from temper_trainer.environment.gateway.chat_history import ChatHistory
from temper_trainer.environment.gateway.gateway_server import MAX_BODY_BYTES, GatewayServer
from temper_trainer.environment.gateway.responses import make_message
from temper_trainer.environment.tool_calls import CallMarkers
from temper_trainer.loops.rollouts.multi_turn import Conversation
from temper_trainer.loops.rollouts.rollout_scheduler import RolloutScheduler
from temper_trainer.rollout.scripted_sampler import ScriptedSampler, ScriptedServer
from temper_trainer.types import Completion, FinishReason, Prompt, SamplingRequest

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments.a }}{% endfor %}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
END = 0
Use = Callable[[AsyncOpenAI], Awaitable[object]]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes that has one token for ab."""
    alphabet = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    vocabulary = {each: i for i, each in enumerate(alphabet)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")


TOKENIZER = make_tokenizer()


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def apart(text: str) -> list[int]:
    """Return a token for each byte, also for ab."""
    return [token for character in text for token in ids(character)]


class StopsAtText(ScriptedSampler):
    """A scripted sampler whose completions end with a stop text."""

    def sample(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        return [
            replace(each, finish_reason=FinishReason.STOP_TEXT) for each in super().sample(requests)
        ]


def use_client(
    use: Use,
    *,
    answers: Sequence[Sequence[int]] = (),
    sampler: ScriptedSampler | None = None,
    max_turns: int = 8,
    max_failure_fraction: float = 0.0,
) -> tuple[Conversation, list[SamplingRequest]]:
    """Run an agent that uses a client, and return its rollout and the sampler's requests."""
    requests: list[SamplingRequest] = []

    def script(request: SamplingRequest) -> Sequence[int]:
        requests.append(request)
        return answers[len(requests) - 1]

    (conversation,) = use_clients(
        use,
        sampler=sampler or ScriptedSampler(script, end_token_id=END),
        num_rollouts=1,
        max_turns=max_turns,
        max_failure_fraction=max_failure_fraction,
    )
    return conversation, requests


def use_clients(
    use: Use,
    *,
    sampler: ScriptedSampler,
    num_rollouts: int,
    max_turns: int = 8,
    max_failure_fraction: float = 0.0,
    template: str = TEMPLATE,
) -> list[Conversation]:
    """Run agents that use clients, and return their rollouts."""

    async def run(task: AgentTask) -> float:
        async with AsyncOpenAI(
            base_url=task.base_url,
            api_key=task.api_key,
            max_retries=0,
            # To load certificates takes 0.1 s of the event loop for each client.
            http_client=httpx.AsyncClient(verify=False),
        ) as client:
            await use(client)
        return 0.0

    gateway = GatewayServer(
        tokenizer=TOKENIZER,
        chat_template=template,
        markers=CallMarkers(start="<call>", end="</call>"),
        address="127.0.0.1",
    )
    prompt = Prompt(prompt_id=0, text="", tokens=(1,), answer="")
    requests = [
        SamplingRequest(
            request_id=i, prompt_tokens=(1,), sampling=SamplingConfig(max_tokens=64), seed=1 + i
        )
        for i in range(num_rollouts)
    ]
    with RolloutScheduler(
        sampler,
        environment=EnvironmentConfig(
            name="some:Agent",
            max_turns=max_turns,
            max_tokens=500,
            max_concurrent=num_rollouts,
            max_failure_fraction=max_failure_fraction,
        ),
        make_environment=AgentFactory(lambda: OpenAiAgent(run, gateway=gateway), gateway=gateway),
    ) as scheduler:
        conversations, _ = scheduler.run(
            scheduler.run_rollouts(requests, prompts=[prompt] * num_rollouts)
        )
    return conversations


async def ask(client: AsyncOpenAI, *messages: tuple[str, str], **options: Any) -> Any:
    return await client.chat.completions.create(
        model="gpt-x",
        messages=[{"role": role, "content": content} for role, content in messages],  # type: ignore[misc]
        **options,
    )


def test_turns_keep_the_sampled_tokens_although_the_agent_sends_text() -> None:
    responses = []

    async def use(client: AsyncOpenAI) -> None:
        first = await ask(client, ("user", "hi"))
        content = first.choices[0].message.content
        second = await ask(client, ("user", "hi"), ("assistant", content), ("user", "go"))
        responses.extend([first, second])

    # The sampled text abc has one token per letter; as text it has a token for ab.
    answers = [[*apart("abc"), END], [*ids("ok"), END]]
    conversation, requests = use_client(use, answers=answers)
    assert [each.choices[0].message.content for each in responses] == ["abc", "ok"]
    assert [each.choices[0].finish_reason for each in responses] == ["stop", "stop"]
    beginning = ids("<user>hi<assistant>")
    expected = [*beginning, *apart("abc"), END, *ids("<user>go<assistant>")]
    assert list(requests[1].prompt_tokens) == expected
    assert responses[1].usage.prompt_tokens == len(expected)
    assert conversation.full_tokens == [*expected, *answers[1]]
    assert len(conversation.turns) == 1
    assert conversation.branches == ()


def test_changed_history_begins_another_sample() -> None:
    async def use(client: AsyncOpenAI) -> None:
        await ask(client, ("system", "a"), ("user", "hi"))
        await ask(client, ("system", "b"), ("user", "hi"), ("assistant", "changed"))

    conversation, _ = use_client(use, answers=[[*ids("x"), END], [*ids("y"), END]])
    assert len(conversation.branches) == 1
    text = TOKENIZER.decode(conversation.request.prompt_tokens)
    assert text == "<system>b<user>hi<assistant>changed<eos><assistant>"


def test_stop_text_is_left_out_of_the_message_and_kept_in_the_conversation() -> None:
    async def use(client: AsyncOpenAI) -> None:
        first = await ask(client, ("user", "hi"), stop=["="], max_completion_tokens=9)
        content = first.choices[0].message.content
        assert content == "4+4"
        await ask(client, ("user", "hi"), ("assistant", content), ("user", "8"))

    sampler = StopsAtText(lambda request: ids("4+4="), end_token_id=END)
    conversation, _ = use_client(use, sampler=sampler)
    assert TOKENIZER.decode(conversation.full_tokens) == (
        "<user>hi<assistant>4+4=<eos><user>8<assistant>4+4="
    )


def test_equal_messages_are_each_read_again_as_they_were_sampled() -> None:
    async def use(client: AsyncOpenAI) -> None:
        messages = [("user", "hi")]
        for _ in range(3):
            response = await ask(client, *messages, stop=["="])
            content = response.choices[0].message.content
            assert content == "Yes"
            messages += [("assistant", content), ("user", "go")]

    # The agent sees the same text although the second completion has no stop text.
    sampled = iter(["Yes=", "Yes", "Yes"])
    sampler = StopsAtText(lambda request: ids(next(sampled)), end_token_id=END)
    conversation, _ = use_client(use, sampler=sampler)
    assert TOKENIZER.decode(conversation.full_tokens) == (
        "<user>hi<assistant>Yes=<eos><user>go<assistant>Yes<eos><user>go<assistant>Yes"
    )
    assert conversation.branches == ()


def test_message_is_read_as_it_was_sampled_after_an_earlier_one_was_changed() -> None:
    async def use(client: AsyncOpenAI) -> None:
        await ask(client, ("user", "hi"), stop=["="])
        await ask(client, ("user", "changed"), ("assistant", "4+4"), ("user", "go"))

    sampler = StopsAtText(lambda request: ids("4+4="), end_token_id=END)
    conversation, _ = use_client(use, sampler=sampler)
    text = TOKENIZER.decode(conversation.request.prompt_tokens)
    assert text == "<user>changed<assistant>4+4=<eos><user>go<assistant>"


class CountingTokenizer(PreTrainedTokenizerFast):
    """A tokenizer that records how many tokens it decodes at a time."""

    num_decoded: ClassVar[list[int]] = []

    def decode(self, token_ids: Any, *args: Any, **kwargs: Any) -> Any:
        self.num_decoded.append(len(token_ids))
        return super().decode(token_ids, *args, **kwargs)


def make_completion(tokens: Sequence[int]) -> Completion:
    return Completion(
        request_id=0,
        tokens=tuple(tokens),
        rollout_logprobs=(-1.0,) * len(tokens),
        finish_reason=FinishReason.MAX_TOKENS,
        weight_version=1,
    )


def test_long_conversation_is_not_decoded_for_each_request() -> None:
    tokenizer = CountingTokenizer(
        tokenizer_object=TOKENIZER.backend_tokenizer, eos_token=TOKENIZER.eos_token
    )
    history = ChatHistory(tokenizer=tokenizer, template=TEMPLATE)
    messages = [{"role": "user", "content": "hi" * 5000}]
    text = history.add(history.encode_chat(messages), make_completion(ids("abc")))
    assert text.full == "abc"
    assert max(tokenizer.num_decoded) < 100


@pytest.mark.parametrize("before", ["", "ab" * 20, "€" * 20])
def test_text_of_a_completion_may_begin_within_a_character(before: str) -> None:
    history = ChatHistory(tokenizer=TOKENIZER, template=TEMPLATE)
    tokens = apart(before + "€x")
    for num_before in range(len(tokens) - 5, len(tokens)):
        prompt = history.encode_prompt(tuple(tokens[:num_before]))
        text = history.add(prompt, make_completion(tokens[num_before:])).full
        both = [TOKENIZER.decode(tokens[:num_before]), TOKENIZER.decode(tokens)]
        is_cut = not both[1].startswith(both[0])
        assert text == (
            TOKENIZER.decode(tokens[num_before:]) if is_cut else both[1].removeprefix(both[0])
        )


def test_logprobs_are_those_of_the_sampled_tokens() -> None:
    async def use(client: AsyncOpenAI) -> None:
        response = await ask(client, ("user", "hi"), logprobs=True, max_tokens=2)
        content = response.choices[0].logprobs.content
        assert [(each.token, each.logprob) for each in content] == [("a", -1.0), ("b", -1.0)]
        assert response.choices[0].finish_reason == "length"
        assert [each.id async for each in await client.models.list()] == ["policy"]

    use_client(use, answers=[apart("abc")])


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_call_of_a_tool_is_parsed_and_read_again_as_it_was_sampled(is_streamed: bool) -> None:
    async def use(client: AsyncOpenAI) -> None:
        messages: list[Any] = [{"role": "user", "content": "hi"}]

        async def step() -> Any:
            response = await client.chat.completions.create(
                model="gpt-x",
                messages=messages,
                tools=TOOLS,  # type: ignore[arg-type]
                stream=is_streamed,
            )
            if not is_streamed:
                return response.choices[0].message.model_dump(), response.choices[0].finish_reason  # type: ignore[union-attr]
            chunks = [chunk async for chunk in response]  # type: ignore[union-attr]
            delta = chunks[1].choices[0].delta
            message = {"role": "assistant", "content": delta.content}
            if delta.tool_calls:
                message["tool_calls"] = [each.model_dump() for each in delta.tool_calls]
            return message, chunks[-1].choices[0].finish_reason

        message, reason = await step()
        (call,) = message["tool_calls"]
        assert (message["content"], reason) == ("Now:", "tool_calls")
        assert call["function"]["name"] == "add"
        assert json.loads(call["function"]["arguments"]) == {"a": 1}
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "42"}]
        message, reason = await step()
        # A malformed call is text, to which the agent can answer.
        assert (message["content"], reason) == ("<call>add", "stop")
        assert not message.get("tool_calls")

    sampled = 'Now: <call>{"name":  "add", "arguments": {"a": 1}}</call>'
    answers = [[*ids(sampled), END], [*ids("<call>add"), END]]
    conversation, _ = use_client(use, answers=answers)
    assert TOKENIZER.decode(conversation.full_tokens) == (
        f"[add]<user>hi<assistant>{sampled}<eos><tool>42<assistant><call>add<eos>"
    )
    assert conversation.branches == ()


@pytest.mark.parametrize(
    "arguments", ["[" * 2000, f'{{"a": {"[" * 200}{"]" * 200}}}', r'{"a": "\ud83d"}']
)
def test_call_that_cannot_be_sent_on_is_text(arguments: str) -> None:
    markers = CallMarkers(start="<call>", end="</call>")
    text = f'<call>{{"name": "add", "arguments": {arguments}}}</call>'
    assert make_message(text, markers=markers, call_id="1") == {
        "role": "assistant",
        "content": text,
    }


def test_changed_call_of_a_tool_is_written_by_the_chat_template() -> None:
    async def use(client: AsyncOpenAI) -> None:
        function = {"name": "add", "arguments": '{"a": 7}'}
        message = {
            "role": "assistant",
            "tool_calls": [{"id": "call_1_0", "type": "function", "function": function}],
        }
        messages = [{"role": "user", "content": "hi"}, message]
        for choice in ("auto", "none"):
            await client.chat.completions.create(
                model="gpt-x",
                messages=messages,
                tools=TOOLS,
                tool_choice=choice,  # type: ignore[call-overload]
            )

    _, requests = use_client(use, answers=[[END], [END]])
    texts = [TOKENIZER.decode(request.prompt_tokens) for request in requests]
    # A policy that may call no tool reads no schemas.
    assert texts == [f"{tools}<user>hi<assistant>7<eos><assistant>" for tools in ("[add]", "")]


def test_text_and_tokens_are_completed_without_a_template() -> None:
    async def use(client: AsyncOpenAI) -> None:
        first = await client.completions.create(
            model="gpt-x", prompt="6*7=", logprobs=0, extra_body={"return_token_ids": True}
        )
        (choice,) = first.choices
        assert (choice.text, choice.finish_reason) == ("ab", "stop")
        assert choice.logprobs is not None
        assert choice.logprobs.text_offset == [0, 1, 2]
        fields = choice.model_dump()
        assert fields["prompt_token_ids"] == ids("6*7=")
        assert fields["token_ids"] == [*apart("ab"), END]
        tokens = [*fields["prompt_token_ids"], *fields["token_ids"], *ids("!")]
        chunks = [
            chunk
            async for chunk in await client.completions.create(
                model="gpt-x",
                prompt=tokens,
                stream=True,
                stream_options={"include_usage": True},
                logprobs=1,
            )
        ]
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "cd"
        logprobs = chunks[0].choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens == ["c", "d", "<eos>"]
        assert logprobs.token_logprobs == [-1.0] * 3
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.prompt_tokens == len(tokens)
        for wrong in ("", [], ["a", "b"], [10_000]):
            with pytest.raises(BadRequestError):
                await client.completions.create(model="gpt-x", prompt=wrong)

    conversation, _ = use_client(use, answers=[[*apart("ab"), END], [*ids("cd"), END]])
    assert TOKENIZER.decode(conversation.full_tokens) == "6*7=ab<eos>!cd<eos>"
    assert len(conversation.turns) == 1


def test_sampled_ids_that_the_tokenizer_does_not_have_may_be_sent_back() -> None:
    unknown = 10_000  # a model may have more ids than its tokenizer

    async def use(client: AsyncOpenAI) -> None:
        first = await client.completions.create(
            model="gpt-x", prompt="hi", logprobs=0, extra_body={"return_token_ids": True}
        )
        (choice,) = first.choices
        assert choice.text == "ab"
        sampled = choice.model_dump()["token_ids"]
        await client.completions.create(model="gpt-x", prompt=[*ids("hi"), *sampled, *ids("!")])
        await ask(client, ("user", "hi"), logprobs=True)

    answers = [[*apart("ab"), unknown, END], [unknown, END], [unknown, *ids("c"), END]]
    conversation, requests = use_client(use, answers=answers)
    assert list(requests[1].prompt_tokens) == [*ids("hi"), *answers[0], *ids("!")]
    assert len(conversation.branches) == 1


def test_streamed_response_has_the_same_text_and_is_recorded() -> None:
    async def use(client: AsyncOpenAI) -> None:
        stream = await ask(
            client, ("user", "hi"), stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        choices = [choice for chunk in chunks for choice in chunk.choices]
        assert "".join(choice.delta.content or "" for choice in choices) == "abc"
        assert choices[0].delta.role == "assistant"
        assert [choice.finish_reason for choice in choices] == [None, None, "stop"]
        assert chunks[-1].usage.completion_tokens == 4

    conversation, _ = use_client(use, answers=[[*apart("abc"), END]])
    assert conversation.tokens == [*apart("abc"), END]


NESTED_CALL = {
    "role": "assistant",
    "tool_calls": [{"function": {"name": "add", "arguments": "[" * 2000}}],
}
SURROGATE = rb'{"messages": [{"role": "user", "content": "\ud800"}]}'


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 2}, "n=2 is not supported"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"extra_body": {"messages": []}}, "at least one message"),
        ({"extra_body": {"messages": [{"role": "robot"}]}}, "role is 'robot'"),
        ({"extra_body": {"messages": [{"role": []}]}}, r"role is \[\]"),
        ({"extra_body": {"best_of": 3}}, "best_of=3 is not supported"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\].function is None"),
        ({"tool_choice": "required"}, "tool_choice='required' is not supported"),
        ({"extra_body": {"messages": [NESTED_CALL]}}, "arguments must be JSON: .* nested too deep"),
    ],
)
def test_request_that_cannot_be_answered_is_refused(options: dict[str, Any], message: str) -> None:
    async def use(client: AsyncOpenAI) -> None:
        with pytest.raises(BadRequestError, match=message):
            await ask(client, ("user", "hi"), **options)
        await ask(client, ("user", "hi"), n=1, temperature=0.2, seed=3)

    use_client(use, answers=[[END]])


@pytest.mark.parametrize(
    ("template", "options", "message"),
    [
        (
            "{{ messages[0].content }}",
            {"messages": [{"role": "user", "content": ""}]},
            "a completion of no tokens: send at least one",
        ),
        (
            "{% for t in tools or [] %}{{ t.function.parameters | dictsort }}{% endfor %}.",
            {"tools": [{"type": "function", "function": {"name": "add", "parameters": [1]}}]},
            "the chat template cannot render the messages",
        ),
    ],
)
def test_request_without_a_prompt_is_refused_and_the_agent_continues(
    template: str, options: dict[str, Any], message: str
) -> None:
    async def use(client: AsyncOpenAI) -> None:
        # A client repeats a request after status 500.
        with pytest.raises(BadRequestError, match=message):
            await ask(client.with_options(max_retries=5), ("user", "hi"), extra_body=options)
        await ask(client, ("user", "hi"))

    sampler = ScriptedSampler(lambda _: [END], end_token_id=END)
    (conversation,) = use_clients(use, sampler=sampler, num_rollouts=1, template=template)
    assert len(conversation.completions) == 1


def test_only_the_token_of_an_open_session_is_accepted() -> None:
    sessions = []

    async def use(client: AsyncOpenAI) -> None:
        with pytest.raises(AuthenticationError, match="belongs to no open session"):
            await ask(client.with_options(api_key="wrong"), ("user", "hi"))
        await ask(client, ("user", "hi"))
        async with httpx.AsyncClient() as http:
            url = f"{client.base_url}chat/completions"
            headers = {"Authorization": f"Bearer {client.api_key}"}
            assert (await http.post(url, content=b"{}")).status_code == 401
            not_text = {b"Authorization": b"Bearer \xff"}
            assert (await http.post(url, content=b"{}", headers=not_text)).status_code == 401
            # OpenAI's client cannot send half of a character.
            half = b'{"messages": [{"role": "user", "content": "a"}], "stop": "\\ud800"}'
            for malformed in (b"{", b"\xff", b"[" * 2000, half, SURROGATE):
                response = await http.post(url, content=malformed, headers=headers)
                assert response.status_code == 400
                assert "is not" in response.json()["error"]["message"]
            unknown = {**headers, "Content-Type": "application/json; charset=unknown"}
            assert (await http.post(url, content=b"{}", headers=unknown)).status_code == 400
            large = await http.post(url, content=b" " * (MAX_BODY_BYTES + 1), headers=headers)
            assert large.status_code == 413
        sessions.append((str(client.base_url), client.api_key))

    use_client(use, answers=[[END]])
    ((base_url, api_key),) = sessions
    # The scheduler has closed the gateway.
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{base_url}models", headers={"Authorization": f"Bearer {api_key}"})


def test_limit_of_a_rollout_is_an_error_that_clients_do_not_repeat() -> None:
    codes = []

    async def use(client: AsyncOpenAI) -> None:
        await ask(client, ("user", "hi"))
        for text in ("x" * 600, "hi", "hi"):
            # With an event stream, the status is sent before the first event.
            try:
                await ask(client.with_options(max_retries=5), ("user", text), stream=text == "hi")
            except BadRequestError as error:
                codes.append(error.code)
            else:
                codes.append(None)

    conversation, requests = use_client(use, answers=[[END]] * 2, max_turns=2)
    # Too long, within the limits, and one more than the limit.
    assert codes == ["rollout_limit", None, "rollout_limit"]
    assert len(requests) == len(conversation.completions) == 2


class DamagedWeights(ScriptedSampler):
    """A scripted sampler whose weights are damaged."""

    def sample(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        raise WeightError("the log-probs are not finite.")


def test_error_of_the_sampler_ends_the_run_and_not_only_the_agent() -> None:
    async def use(client: AsyncOpenAI) -> None:
        with contextlib.suppress(InternalServerError):
            await ask(client, ("user", "hi"))
        await asyncio.sleep(30)

    with pytest.raises(WeightError, match="not finite"):
        use_client(use, sampler=DamagedWeights(lambda _: [3], end_token_id=END))


def test_request_that_the_sampler_refuses_fails_only_the_agents_rollout() -> None:
    async def use(client: AsyncOpenAI) -> None:
        # Without retries of the client, because the sampler would refuse the request again.
        await ask(client.with_options(max_retries=5), ("user", "hi"))

    # An empty script is refused.
    conversation, requests = use_client(use, answers=[[]], max_failure_fraction=1.0)
    assert "BadRequestError: Error code: 400" in (conversation.failure or "")
    assert "a script without tokens" in (conversation.failure or "")
    assert len(requests) == 1


def test_agent_continues_after_a_refused_request() -> None:
    async def use(client: AsyncOpenAI) -> None:
        with pytest.raises(BadRequestError) as caught:
            await ask(client, ("user", "a long history"))
        assert caught.value.code == "refused_request"
        await ask(client, ("user", "a short one"))

    conversation, _ = use_client(use, answers=[[], [END]])
    assert conversation.failure is None
    assert len(conversation.completions) == 1


def test_completion_that_the_client_did_not_wait_for_is_not_trained() -> None:
    async def use(client: AsyncOpenAI) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await ask(client, ("user", "slow"))
        await ask(client, ("user", "hi"), max_tokens=1)

    server = ScriptedServer(
        lambda request: [3] * (40 if len(request.prompt_tokens) > 20 else 1),
        end_token_id=END,
        token_s=0.02,
        max_concurrent=4,
    )
    conversation, _ = use_client(use, sampler=server)
    assert [list(each.tokens) for each in conversation.completions] == [[3]]


def test_answer_that_came_too_late_is_sent_again() -> None:
    answers: list[str] = []

    async def use(client: AsyncOpenAI) -> None:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        async with httpx.AsyncClient() as http:
            # OpenAI's client counts its attempts; the third request here is not a repetition.
            for count in ("0", "1", "0"):
                headers = {
                    "Authorization": f"Bearer {client.api_key}",
                    "x-stainless-retry-count": count,
                }
                url = f"{client.base_url}chat/completions"
                response = await http.post(url, json=body, headers=headers)
                answers.append(response.json()["choices"][0]["message"]["content"])

    conversation, requests = use_client(use, answers=[[*ids("x"), END], [*ids("y"), END]])
    assert answers == ["x", "x", "y"]
    assert len(requests) == 2
    assert len(conversation.branches) == 1


def test_lengths_are_those_that_were_sampled_although_clients_time_out() -> None:
    sampled: list[int] = []
    num_rollouts, token_s, timeout_s = 32, 0.04, 0.6

    def script(request: SamplingRequest) -> list[int]:
        length = min(1 + int(random.Random(request.seed).lognormvariate(2.5, 0.8)), 64)
        sampled.append(length)
        return [3] * length

    async def use(client: AsyncOpenAI) -> None:
        await ask(client.with_options(timeout=timeout_s, max_retries=9), ("user", "hi"))

    server = ScriptedServer(script, end_token_id=END, token_s=token_s, max_concurrent=99)
    conversations = use_clients(use, sampler=server, num_rollouts=num_rollouts)
    # Nothing is sampled again, and all that is sampled is trained.
    assert sorted(len(each.tokens) for each in conversations) == sorted(sampled)
    assert len(sampled) == num_rollouts
    num_late = sum(length * token_s > timeout_s for length in sampled)
    repeated = [each.metrics[0]["agent/repeated_requests"] for each in conversations]
    assert sum(each > 0 for each in repeated) >= num_late >= 8
