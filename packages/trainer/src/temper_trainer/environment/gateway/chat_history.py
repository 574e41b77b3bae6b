"""Turn the messages of an agent into tokens that continue what the policy has sampled.

An agent sends all messages of the conversation with each request, as text. Tokenizing the full text
could give different tokens than the policy has sampled. If the text begins with an earlier request
and its completion, their tokens are therefore used again, and only the rest is tokenized.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from temper_trainer.environment.gateway.chat_request import RequestError, parse_messages
from temper_trainer.types import Completion, FinishReason

_NUM_CONTEXT_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """Text that the policy reads, and its tokens."""

    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledText:
    """Text of a completion without its end token."""

    full: str
    """Text with special tokens, as the policy reads it again."""
    plain: str
    """Text without special tokens."""


@dataclass(slots=True, kw_only=True)
class ChatHistory:
    """The requests of one agent, and the completions that it got."""

    tokenizer: PreTrainedTokenizerBase
    template: str | None
    """Chat template; None is that of the tokenizer."""
    _read: list[EncodedPrompt] = field(default_factory=list)
    """Each earlier prompt with its completion."""
    _sampled: dict[int, str] = field(default_factory=dict)
    """Sampled text of each message that was returned, by `_hash_messages` of the conversation up to
    this message and of the message by itself.
    """

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = ()
    ) -> EncodedPrompt:
        """Return the tokens of messages in the chat template, which opens the assistant's turn.

        The template also describes the tools.

        Raises:
            RequestError: If the template cannot render them.
        """
        try:
            text = self.tokenizer.apply_chat_template(
                self._restore(messages),
                tools=[dict(tool) for tool in tools] or None,
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=True,
            )
        # A template calls methods of what the agent has sent, which may have another type.
        except (jinja2.TemplateError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise RequestError(f"the chat template cannot render the messages: {error}") from error
        assert isinstance(text, str)
        return self.encode_text(text)

    def encode_text(self, text: str) -> EncodedPrompt:
        """Return a text with its tokens; reuse those of the longest earlier text at its start."""
        read = max(
            (each for each in self._read if text.startswith(each.text)),
            key=lambda each: len(each.text),
            default=EncodedPrompt(text="", tokens=()),
        )
        rest = self.tokenizer(text[len(read.text) :], add_special_tokens=False)["input_ids"]
        return EncodedPrompt(text=text, tokens=(*read.tokens, *rest))

    def encode_prompt(self, prompt: str | tuple[int, ...]) -> EncodedPrompt:
        """Return a prompt with its tokens; a prompt may be text or token ids.

        Raises:
            RequestError: If a token id is neither the tokenizer's nor was sampled.
        """
        if isinstance(prompt, str):
            return self.encode_text(prompt)
        unknown = {token for token in prompt if not 0 <= token < len(self.tokenizer)}
        # A model may have more ids than the tokenizer, and sample them.
        if unknown and not unknown.issubset(token for each in self._read for token in each.tokens):
            raise RequestError(f"token ids must be at least 0 and below {len(self.tokenizer)}")
        return EncodedPrompt(text=str(self.tokenizer.decode(list(prompt))), tokens=prompt)

    def add(self, prompt: EncodedPrompt, completion: Completion) -> SampledText:
        """Add a completion, and return its text."""
        tokens = completion.tokens
        text = prompt.text + self._decode_after(prompt.tokens, tokens)
        self._read.append(EncodedPrompt(text=text, tokens=(*prompt.tokens, *tokens)))
        if completion.finish_reason == FinishReason.END_TOKEN:
            tokens = tokens[:-1]  # the chat template adds it
        return SampledText(
            full=self._decode_after(prompt.tokens, tokens),
            plain=str(self.tokenizer.decode(list(tokens), skip_special_tokens=True)),
        )

    def add_message(
        self,
        message: Mapping[str, Any],
        *,
        after: Sequence[Mapping[str, Any]],
        sampled: str,
    ) -> None:
        """Record the message that was returned for a sampled text, after those of its request.

        The message may lack a stop text, or have calls of tools in a form of its own. When the
        agent sends it back, the policy reads what it has sampled.
        """
        (parsed,) = parse_messages([message])
        for conversation in ([*after, parsed], [parsed]):
            self._sampled[_hash_messages(conversation)[-1]] = sampled

    def _restore(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return messages with the texts that were sampled for them, if they were.

        Different sampled texts may have equal messages, so the text of the same conversation comes
        first. If the agent has changed an earlier message, it is the last text of an equal message.
        """
        restored = []
        for message, position in zip(messages, _hash_messages(messages), strict=True):
            sampled = None
            if message["role"] == "assistant":
                single = _hash_messages([message])[-1]
                sampled = self._sampled.get(position, self._sampled.get(single))
            restored.append(
                dict(message) if sampled is None else {"role": "assistant", "content": sampled}
            )
        return restored

    def _decode_after(self, before: Sequence[int], tokens: Sequence[int]) -> str:
        """Return the text of tokens after others: some tokenizers drop a space at the beginning."""
        # Decoding a long conversation would take most of the request's time. The last tokens are
        # enough, unless the first of them begins within a character.
        for context in (before[-_NUM_CONTEXT_TOKENS:], before):
            start = str(self.tokenizer.decode(list(context)))
            full = str(self.tokenizer.decode([*context, *tokens]))
            if full.startswith(start) and ("\ufffd" not in start or context is before):
                return full[len(start) :]
        return str(self.tokenizer.decode(list(tokens)))


def _hash_messages(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return a hash of the conversation up to each message.

    It reads only the fields of a returned message that the agent sends back.
    """
    hashes, previous = [], 0
    for message in messages:
        fields = [message["role"], message["content"], message.get("tool_calls") or []]
        previous = hash((previous, json.dumps(fields)))
        hashes.append(previous)
    return hashes
