"""Continuous batching: a finished sequence frees its slot at once for a waiting one.

Prefill computes a prompt up to its second to last token. The last token is the first input of
decoding, so that every sampled token, the first included, comes from the same kind of forward pass.
Equal prompts are prefilled once.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from temper_trainer.progress import advance_progress
from temper_trainer.rollout.kv_cache import DecodeAttention, PrefillAttention, SlotKVCache
from temper_trainer.rollout.token_sampling import TokenSamplingOptions, sample_tokens
from temper_trainer.types import Completion, FinishReason, SamplingRequest

_PREFILL_TOKENS = 8192
"""Largest prefill, in tokens with padding; a longer prompt is prefilled alone."""
_REFILL_DIVISOR = 8
"""Waiting requests are admitted once 1 / this of the slots is free, for fewer and larger prefills."""


@dataclass(slots=True, kw_only=True)
class _Sequence:
    """A request in a slot."""

    index: int
    """Index of the request in the call of `sample`."""
    request: SamplingRequest
    tokens: list[int] = field(default_factory=list)
    """Sampled so far."""
    logprobs: list[float] = field(default_factory=list)

    @property
    def current(self) -> int:
        """Input token of the next step."""
        return self.tokens[-1] if self.tokens else self.request.prompt_tokens[-1]

    @property
    def position(self) -> int:
        """Position of the input token in the sequence."""
        return len(self.request.prompt_tokens) + len(self.tokens) - 1


class ContinuousBatchDecoder:
    """Decodes the requests of one `sample` call."""

    def __init__(
        self,
        requests: Sequence[SamplingRequest],
        *,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        end_token_ids: frozenset[int],
        max_concurrent: int,
        weight_version: int,
        is_interrupted: Callable[[], bool] = lambda: False,
        compute_lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._end_token_ids = end_token_ids
        self._version = weight_version
        self._is_interrupted = is_interrupted
        self._compute_lock = compute_lock or nullcontext()
        self._device = model.device
        self._waiting = deque(
            _Sequence(index=i, request=request) for i, request in enumerate(requests)
        )
        self._num_slots = min(max_concurrent, len(requests))
        self._active: list[_Sequence] = []
        self._cache = SlotKVCache(num_layers=model.config.get_text_config().num_hidden_layers)
        self._max_length = max(
            (len(r.prompt_tokens) + r.sampling.max_tokens for r in requests), default=0
        )
        self._completions: dict[int, Completion] = {}

    def run(self) -> list[Completion]:
        """Decode until every request is finished or interrupted; return completions in order."""
        options: TokenSamplingOptions | None = None
        while (self._waiting or self._active) and not self._is_interrupted():
            # Released after each step, so that an engine in this process can run between steps.
            with self._compute_lock:
                num_free = self._num_slots - len(self._active)
                if self._waiting and num_free * _REFILL_DIVISOR >= self._num_slots:
                    self._admit(num_free)
                    options = None
                if options is None:
                    options = self._options()
                # Options are stored by slot, and a finished sequence changes the slots.
                if self._step(options):
                    options = None
        for sequence in (*self._active, *self._waiting):
            self._completions[sequence.index] = self._completion(sequence, FinishReason.INTERRUPTED)
        return [self._completions[index] for index in range(len(self._completions))]

    def _options(self) -> TokenSamplingOptions:
        requests = [sequence.request for sequence in self._active]
        return TokenSamplingOptions.from_configs(
            [r.sampling for r in requests], seeds=[r.seed for r in requests], device=self._device
        )

    def _admit(self, num_free: int) -> None:
        """Put waiting requests into free slots and prefill each distinct prompt once."""
        first = len(self._active)
        self._active += [self._waiting.popleft() for _ in range(min(num_free, len(self._waiting)))]
        self._reserve(num_slots=self._num_slots)
        slots: dict[tuple[int, ...], list[int]] = {}
        for slot, sequence in enumerate(self._active[first:], start=first):
            slots.setdefault(sequence.request.prompt_tokens[:-1], []).append(slot)
        # A prompt of one token has nothing to prefill: its token is the first input of decoding.
        slots.pop((), None)
        # By length, so that prompts that are prefilled together need little padding.
        longest_first = sorted(slots, key=len, reverse=True)
        while longest_first:
            count = max(1, _PREFILL_TOKENS // len(longest_first[0]))
            chosen, longest_first = longest_first[:count], longest_first[count:]
            self._prefill(chosen, [slots[prefix] for prefix in chosen])

    def _prefill(self, prefixes: Sequence[tuple[int, ...]], slots: Sequence[Sequence[int]]) -> None:
        padded = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(prefix) for prefix in prefixes], batch_first=True
        ).to(self._device)
        positions = torch.arange(padded.shape[1], device=self._device).expand_as(padded)
        attention = PrefillAttention(self._cache, slots=slots, device=self._device)
        # Without the output head: only keys and values are needed.
        self._model.base_model(
            input_ids=padded, position_ids=positions, use_cache=False, slots=attention
        )

    def _reserve(self, *, num_slots: int) -> None:
        longest = max(sequence.position for sequence in self._active) + 1
        self._cache.reserve(num_slots=num_slots, length=longest, max_length=self._max_length)

    def _step(self, options: TokenSamplingOptions) -> bool:
        """Sample one token for every active sequence; return True if any finished."""
        # Once no request waits, freed slots stay empty, so a reallocation may drop them.
        self._reserve(num_slots=self._num_slots if self._waiting else len(self._active))
        longest = max(sequence.position for sequence in self._active)
        positions = torch.tensor(
            [sequence.position for sequence in self._active], device=self._device
        )
        current = torch.tensor([sequence.current for sequence in self._active], device=self._device)
        attention = DecodeAttention(self._cache, positions=positions, longest=longest)
        outputs = self._model(
            input_ids=current[:, None],
            position_ids=positions[:, None],
            use_cache=False,
            slots=attention,
        )
        sampled, logprobs = sample_tokens(
            outputs.logits[:, 0].float(),
            options=options,
            positions=[len(s.tokens) for s in self._active],
        )
        finished = []
        for slot, (sequence, token, logprob) in enumerate(
            zip(self._active, sampled.tolist(), logprobs.tolist(), strict=True)
        ):
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            reason = self._finish_reason(sequence)
            if reason is not None:
                self._completions[sequence.index] = self._completion(sequence, reason)
                finished.append(slot)
        advance_progress("completions", len(finished))
        self._free(finished)
        return bool(finished)

    def _finish_reason(self, sequence: _Sequence) -> FinishReason | None:
        sampling = sequence.request.sampling
        if sequence.tokens[-1] in self._end_token_ids:
            return FinishReason.END_TOKEN
        if sampling.stop and self._ends_in_stop_text(sequence):
            return FinishReason.STOP_TEXT
        return FinishReason.MAX_TOKENS if len(sequence.tokens) >= sampling.max_tokens else None

    def _ends_in_stop_text(self, sequence: _Sequence) -> bool:
        """Return True if the last tokens contain a stop text.

        Decoding the tail is enough: a character has at most four tokens (its bytes), and earlier
        steps have checked earlier tokens.
        """
        longest = max(len(text) for text in sequence.request.sampling.stop)
        tail = self._tokenizer.decode(sequence.tokens[-4 * longest - 4 :], skip_special_tokens=True)
        return any(text in tail for text in sequence.request.sampling.stop)

    def _completion(self, sequence: _Sequence, reason: FinishReason) -> Completion:
        return Completion(
            request_id=sequence.request.request_id,
            tokens=tuple(sequence.tokens),
            rollout_logprobs=tuple(sequence.logprobs),
            finish_reason=reason,
            weight_version=self._version,
        )

    def _free(self, finished: Sequence[int]) -> None:
        """Move sequences from the highest slots into freed ones: decoding reads the first n slots."""
        # From the highest slot, so that the sequence that moves is never a finished one.
        for slot in reversed(finished):
            last = self._active.pop()
            if slot < len(self._active):
                self._active[slot] = last
                self._cache.copy_slot(source=len(self._active), target=slot)
