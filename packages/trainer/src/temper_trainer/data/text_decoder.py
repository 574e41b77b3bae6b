"""Decode completions in a fraction of the tokenizer's time.

The tokenizers library takes 2 ms for 8,192 tokens, in the event loop that all rollouts need: half a
minute for a step of 16,384 such completions. With byte-level BPE, which most models have, the text
of a sequence is the concatenation of its tokens' bytes.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import decoders, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from temper_trainer.types import pack_tokens

if TYPE_CHECKING:
    from array import array


class TextDecoder:
    """Returns the text of tokens without special tokens, as the tokenizer's `decode` does."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Keep the tokenizer; the bytes of its tokens are listed at the first call."""
        self._tokenizer = tokenizer

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        if self._table is not None:
            try:
                return self._table.join(pack_tokens(tokens)).decode("utf-8", errors="replace")
            except IndexError:
                pass  # a model may have more ids than the tokenizer, which leaves them out
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    @cached_property
    def _table(self) -> "_ByteTable | None":
        """Bytes of each token, none for special ones; None if only the tokenizer can decode."""
        tokenizer = self._tokenizer
        if (
            not isinstance(tokenizer, PreTrainedTokenizerFast)
            or type(tokenizer).decode is not PreTrainedTokenizerFast.decode
            or type(tokenizer)._decode is not PreTrainedTokenizerFast._decode
            or tokenizer.clean_up_tokenization_spaces
            or not isinstance(tokenizer.backend_tokenizer.decoder, decoders.ByteLevel)
        ):
            return None
        backend = tokenizer.backend_tokenizer
        special = {each.content for each in tokenizer.added_tokens_decoder.values() if each.special}
        byte_of = _map_characters()
        listed: list[bytes] = []
        for token_id in range(max(backend.get_vocab(with_added_tokens=True).values()) + 1):
            token = backend.id_to_token(token_id)
            if token is None or token in special:
                listed.append(b"")
            elif all(character in byte_of for character in token):
                listed.append(bytes(byte_of[character] for character in token))
            else:
                # Added as text, not as characters that stand for bytes.
                listed.append(token.encode())
        return _ByteTable(listed)


class _ByteTable:
    """The bytes of all tokens in one array.

    A bytes object for each of 150,000 tokens would be slower: they are spread over several
    megabytes, which do not fit in the caches of a core that other programs use, too.
    """

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._bytes = np.frombuffer(b"".join(token_bytes), dtype=np.uint8)
        self._lengths = np.array([len(each) for each in token_bytes], dtype=np.int32)
        self._starts = (np.cumsum(self._lengths) - self._lengths).astype(np.int32)

    def join(self, tokens: "array[int]") -> bytes:
        """Return the bytes of tokens one after the other; raise IndexError for unknown ids."""
        ids = np.asarray(tokens)
        lengths = self._lengths[ids]
        ends = np.cumsum(lengths)
        # From the position of a byte in the result to its position in the table.
        shifts = np.repeat(self._starts[ids] - (ends - lengths), lengths)
        return self._bytes[shifts + np.arange(len(shifts))].tobytes()


def _map_characters() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for."""
    # As in GPT-2: printable characters of Latin-1 stand for themselves. The n-th other
    # byte is written as character 256 + n.
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    printable = {chr(byte): byte for byte in range(256) if chr(byte) in alphabet}
    others = [byte for byte in range(256) if chr(byte) not in printable]
    return printable | {chr(256 + i): byte for i, byte in enumerate(others)}
