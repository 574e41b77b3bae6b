"""The `hf` sampler: continuous batching on a transformers model, on any device.

A finished sequence frees its slot at once for a waiting one. Prefill computes a prompt up to its
second to last token. The last token is the first input of decoding, so that every sampled token,
the first included, comes from the same kind of forward pass. Equal prompts are prefilled once.

Models with other layers than attention, such as linear attention, have no cache here: each step
computes the full sequences, exact but slow.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from temper_engine_api.errors import EngineStateError
from temper_engine_api.specs import ModelSpec
from temper_engine_api.weights import NamedWeight
from temper_trainer.config.rollout import RolloutConfig
from temper_trainer.progress import advance_progress
from temper_trainer.rollout.hf_model import (
    ExpertRecorder,
    WeightTargets,
    build_model,
    check_layers,
    compute_logits,
    find_end_token_ids,
    split_passes,
)
from temper_trainer.rollout.kv_cache import DecodeAttention, PrefillAttention, SlotKVCache
from temper_trainer.rollout.sampler import check_requests
from temper_trainer.rollout.stop_texts import ends_in_stop_text
from temper_trainer.rollout.token_sampling import TokenSamplingOptions, sample_tokens
from temper_trainer.rollout.weight_delta import DeltaBucket, StaleBaseError
from temper_trainer.types import Completion, FinishReason, SamplingRequest

_PREFILL_TOKENS = 8192
"""Largest prefill, in tokens with padding; a longer prompt is prefilled alone."""
_REFILL_DIVISOR = 8
"""Waiting requests are admitted once 1 / this of the slots are free, so that prefills are fewer and
larger."""


@dataclass(slots=True, kw_only=True)
class _Sequence:
    """A request in a slot."""

    index: int
    """Index of the request in the `sample` call."""
    request: SamplingRequest
    tokens: list[int] = field(default_factory=list)
    """Token ids that were sampled so far."""
    logprobs: list[float] = field(default_factory=list)
    experts: list[Tensor] = field(default_factory=list)
    """Experts [n, layers, K] of the tokens that were processed so far, if they are recorded."""

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
        uses_cache: bool = True,
        recorder: ExpertRecorder | None = None,
        is_interrupted: Callable[[], bool] = lambda: False,
        compute_lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._end_token_ids = end_token_ids
        self._version = weight_version
        self._uses_cache = uses_cache
        self._recorder = recorder
        self._is_interrupted = is_interrupted
        self._compute_lock = compute_lock or nullcontext()
        self._device = model.device
        self._waiting = deque(
            _Sequence(index=i, request=request) for i, request in enumerate(requests)
        )
        self._num_slots = min(max_concurrent, len(requests))
        self._active: list[_Sequence] = []
        self._cache = SlotKVCache(num_layers=model.config.get_text_config().num_hidden_layers)
        # No sequence of this call gets longer, so the cache need not grow beyond it.
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
        if not self._uses_cache:
            return
        # For all slots at once: growing them one by one would copy the cache each time.
        self._reserve(num_slots=self._num_slots)
        slots: dict[tuple[int, ...], list[int]] = {}
        for slot, sequence in enumerate(self._active[first:], start=first):
            # Completions in a group have the same prompt, so most need no prefill.
            slots.setdefault(sequence.request.prompt_tokens[:-1], []).append(slot)
        # A prompt of one token has nothing to prefill: its token is the first input of decoding.
        slots.pop((), None)
        # Sort by length, so that prompts that are prefilled together need little padding.
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
        # Call the model below the output head, since only keys and values are needed.
        self._model.base_model(
            # The cache of transformers is off: keys and values are in the slots.
            input_ids=padded,
            position_ids=positions,
            use_cache=False,
            slots=attention,
        )
        if self._recorder is not None:
            experts = self._recorder.take(len(prefixes))
            for prefix, of_prefix, prefix_slots in zip(prefixes, experts, slots, strict=True):
                for slot in prefix_slots:
                    self._active[slot].experts.append(of_prefix[: len(prefix)])

    def _reserve(self, *, num_slots: int) -> None:
        longest = max(sequence.position for sequence in self._active) + 1
        self._cache.reserve(num_slots=num_slots, length=longest, max_length=self._max_length)

    def _step(self, options: TokenSamplingOptions) -> bool:
        """Sample one token for every active sequence; return True if any finished."""
        logits = self._decode() if self._uses_cache else self._recompute()
        sampled, logprobs = sample_tokens(
            logits.float(), options=options, positions=[len(s.tokens) for s in self._active]
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

    def _decode(self) -> Tensor:
        """Return the logits [n, V] after the current token in all active sequences."""
        # Once no request waits, freed slots stay empty, so a reallocation may drop them.
        self._reserve(num_slots=self._num_slots if self._waiting else len(self._active))
        longest = max(sequence.position for sequence in self._active)
        positions = torch.tensor(
            [sequence.position for sequence in self._active], device=self._device
        )
        current = torch.tensor([sequence.current for sequence in self._active], device=self._device)
        attention = DecodeAttention(self._cache, positions=positions, longest=longest)
        logits: Tensor = self._model(
            input_ids=current[:, None],
            position_ids=positions[:, None],
            use_cache=False,
            slots=attention,
        ).logits
        if self._recorder is not None:
            experts = self._recorder.take(len(self._active))
            for sequence, of_token in zip(self._active, experts, strict=True):
                sequence.experts.append(of_token)
        return logits[:, 0]

    def _recompute(self) -> Tensor:
        """Return the same logits from passes over all tokens of the sequences."""
        tokens = [(*each.request.prompt_tokens, *each.tokens) for each in self._active]
        last, waiting = [], iter(self._active)
        for chosen in split_passes(self._model, tokens):
            _, logits = compute_logits(self._model, chosen)
            ends = torch.tensor([len(each) - 1 for each in chosen], device=self._device)
            last.append(logits[torch.arange(len(chosen), device=self._device), ends])
            if self._recorder is None:
                continue
            recorded, batch = self._recorder.take(len(chosen)), islice(waiting, len(chosen))
            for experts, sequence in zip(recorded, batch, strict=True):
                # Later passes choose again for earlier tokens. Keep the choices of the pass that
                # sampled the next token.
                first = sequence.position if sequence.experts else 0
                sequence.experts.append(experts[first : sequence.position + 1])
        return torch.cat(last)

    def _finish_reason(self, sequence: _Sequence) -> FinishReason | None:
        sampling = sequence.request.sampling
        if sequence.tokens[-1] in self._end_token_ids:
            return FinishReason.END_TOKEN
        if sampling.stop and ends_in_stop_text(
            sequence.tokens, stop=sampling.stop, tokenizer=self._tokenizer
        ):
            return FinishReason.STOP_TEXT
        return FinishReason.MAX_TOKENS if len(sequence.tokens) >= sampling.max_tokens else None

    def _completion(self, sequence: _Sequence, reason: FinishReason) -> Completion:
        return Completion(
            request_id=sequence.request.request_id,
            tokens=tuple(sequence.tokens),
            rollout_logprobs=tuple(sequence.logprobs),
            finish_reason=reason,
            weight_version=self._version,
            routed_experts=torch.cat(sequence.experts) if sequence.experts else None,
        )

    def _free(self, finished: Sequence[int]) -> None:
        """Move sequences from the highest slots into freed ones.

        Decoding reads the first n slots, so these must be contiguous.
        """
        # From the highest slot, so that the sequence that moves is never a finished one.
        for slot in reversed(finished):
            last = self._active.pop()
            if slot < len(self._active):
                self._active[slot] = last
                self._cache.copy_slot(source=len(self._active), target=slot)


_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class HfSampler:
    """A Sampler on a transformers model in this process."""

    def __init__(
        self,
        *,
        model: ModelSpec,
        tokenizer: PreTrainedTokenizerBase,
        config: RolloutConfig,
        device: str | None = None,
        compute_lock: AbstractContextManager[object] | None = None,
    ) -> None:
        """Build the model with the weights of the spec, as version 0.

        Args:
            model: The model to build.
            tokenizer: Names the end token and decodes completions to find stop texts.
            config: Number of concurrent sequences, and dtype.
            device: None selects CUDA if it is available.
            compute_lock: Acquired for every forward pass. Engines in the same process acquire it
                while they change process-wide torch settings; see InlineWorkerGroup.

        Raises:
            ConfigError: If the model cannot be built, has layers that this sampler does not
                support, or there is no end token.
        """
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._model: PreTrainedModel | None = build_model(
            model, dtype=_DTYPES[config.dtype], device=self._device
        )
        self._targets: WeightTargets | None = WeightTargets(self._model)
        self._uses_cache = check_layers(self._model)
        self._end_token_ids = find_end_token_ids(
            self._model, model, tokenizer_end=tokenizer.eos_token_id
        )
        replays_sampler = config.routing_replay == "sampler"
        self._recorder = ExpertRecorder(self._model) if replays_sampler else None
        self._tokenizer = tokenizer
        self._config = config
        self._version = 0
        self._interrupted = threading.Event()
        self._compute_lock = compute_lock or nullcontext()

    @property
    def weight_version(self) -> int:
        """Version of the current weights; 0 before the first publish."""
        return self._version

    @torch.inference_mode()
    def sample(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        """Return one completion per request; see Sampler."""
        model = self._require_model()
        config = model.config.get_text_config()
        check_requests(
            requests,
            vocab_size=config.vocab_size,
            max_length=config.max_position_embeddings,
            limit=f"the model has {config.max_position_embeddings}:",
        )
        decoding = ContinuousBatchDecoder(
            requests,
            model=model,
            tokenizer=self._tokenizer,
            end_token_ids=self._end_token_ids,
            max_concurrent=self._config.max_concurrent,
            weight_version=self._version,
            uses_cache=self._uses_cache,
            recorder=self._recorder,
            is_interrupted=self._interrupted.is_set,
            compute_lock=self._compute_lock,
        )
        return decoding.run()

    def interrupt(self) -> None:
        """Make `sample` return at once until new weights are loaded; see InterruptibleSampler."""
        self._interrupted.set()

    def load_weights(self, stream: Iterable[NamedWeight], *, version: int) -> None:
        """Load all weights; see Sampler."""
        self._require_targets().load(stream)
        self._version = version
        self._interrupted.clear()

    def load_delta(
        self, buckets: Sequence[DeltaBucket], *, base_version: int, version: int
    ) -> None:
        """Apply a delta to the current weights, which stay unchanged on an error.

        Raises:
            StaleBaseError: If the current weights are not `base_version`.
            WeightError: If a bucket is damaged or does not fit.
        """
        if self._version != base_version:
            raise StaleBaseError(
                f"a delta relative to weights {base_version} arrived, but the sampler has weights "
                f"{self._version}."
            )
        self._require_targets().load_delta(buckets)
        self._version = version
        self._interrupted.clear()

    @torch.inference_mode()
    def compute_logprobs(
        self, tokens: Sequence[Sequence[int]], *, temperature: float
    ) -> list[list[float]]:
        """Return the log-prob of every token but the first; see Sampler."""
        model = self._require_model()
        logprobs: list[list[float]] = []
        for chosen in split_passes(model, tokens):
            with self._compute_lock:
                padded, logits = compute_logits(model, chosen)
            # In float32 also for a bf16 model: these log-probs are compared with the engine's.
            tempered = logits[:, :-1].float() / temperature
            labels = padded[:, 1:, None]
            logprobs += (tempered.gather(-1, labels)[..., 0] - tempered.logsumexp(-1)).tolist()
        return [row[: len(seq) - 1] for row, seq in zip(logprobs, tokens, strict=True)]

    def close(self) -> None:
        """Free the model."""
        self._model = self._targets = None

    def _require_targets(self) -> WeightTargets:
        self._require_model()
        assert self._targets is not None
        return self._targets

    def _require_model(self) -> PreTrainedModel:
        if self._model is None:
            raise EngineStateError("the sampler is closed: create a new one.")
        return self._model
