"""The `hf` sampler: continuous batching on a transformers model, on any device."""

import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from temper_engine_api.errors import ConfigError, EngineStateError
from temper_engine_api.specs import ModelSpec
from temper_engine_api.weights import NamedWeight
from temper_trainer.config.rollout import RolloutConfig
from temper_trainer.rollout.continuous_batching import ContinuousBatchDecoder
from temper_trainer.rollout.hf_model import (
    build_model,
    find_end_token_ids,
    load_delta,
    load_weights,
)
from temper_trainer.rollout.kv_cache import CausalAttention
from temper_trainer.rollout.weight_delta import DeltaBucket, StaleBaseError
from temper_trainer.types import Completion, SamplingRequest

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_MAX_LOGITS = 1 << 25
"""Largest number of logits in a forward pass for log-probs, which bounds its memory."""


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
            compute_lock: Acquired for every forward pass. Engines of the same process acquire it
                while they change process-wide settings of torch; see InlineWorkerGroup.

        Raises:
            ConfigError: If the model cannot be built or there is no end token.
        """
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._model: PreTrainedModel | None = build_model(
            model, dtype=_DTYPES[config.dtype], device=self._device
        )
        self._end_token_ids = find_end_token_ids(
            self._model, model, tokenizer_end=tokenizer.eos_token_id
        )
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
        self._check(requests, model)
        decoding = ContinuousBatchDecoder(
            requests,
            model=model,
            tokenizer=self._tokenizer,
            end_token_ids=self._end_token_ids,
            max_concurrent=self._config.max_concurrent,
            weight_version=self._version,
            is_interrupted=self._interrupted.is_set,
            compute_lock=self._compute_lock,
        )
        return decoding.run()

    def interrupt(self) -> None:
        """Let `sample` return at once, until the next weights are loaded; see InterruptibleSampler."""
        self._interrupted.set()

    def load_weights(self, stream: Iterable[NamedWeight], *, version: int) -> None:
        """Load all weights; see Sampler."""
        load_weights(self._require_model(), stream)
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
                f"a delta to weights {base_version} arrived, but the sampler has weights "
                f"{self._version}."
            )
        load_delta(self._require_model(), buckets)
        self._version = version
        self._interrupted.clear()

    @torch.inference_mode()
    def logprobs(self, tokens: Sequence[Sequence[int]], *, temperature: float) -> list[list[float]]:
        """Return the log-prob of every token but the first; see Sampler."""
        model = self._require_model()
        longest = max(len(sequence) for sequence in tokens)
        rows = max(1, _MAX_LOGITS // (longest * model.config.get_text_config().vocab_size))
        logprobs: list[list[float]] = []
        for first in range(0, len(tokens), rows):
            chosen = tokens[first : first + rows]
            with self._compute_lock:
                values = self._compute_logprobs(model, chosen, temperature=temperature)
            logprobs += [
                row[: len(sequence) - 1]
                for row, sequence in zip(values.tolist(), chosen, strict=True)
            ]
        return logprobs

    def close(self) -> None:
        """Free the model."""
        self._model = None

    def _compute_logprobs(
        self, model: PreTrainedModel, tokens: Sequence[Sequence[int]], *, temperature: float
    ) -> Tensor:
        """Return [B, L - 1] float32 log-probs of sequences, padded on the right."""
        padded = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(sequence) for sequence in tokens], batch_first=True
        ).to(self._device)
        positions = torch.arange(padded.shape[1], device=self._device).expand_as(padded)
        logits = model(
            input_ids=padded, position_ids=positions, use_cache=False, slots=CausalAttention()
        ).logits
        tempered = logits[:, :-1].float() / temperature
        chosen: Tensor = tempered.gather(-1, padded[:, 1:, None])[..., 0] - tempered.logsumexp(-1)
        return chosen

    def _check(self, requests: Sequence[SamplingRequest], model: PreTrainedModel) -> None:
        config = model.config.get_text_config()
        if len({request.request_id for request in requests}) != len(requests):
            raise ConfigError(
                "two sampling requests share a request_id: give each request its own id."
            )
        for request in requests:
            length = len(request.prompt_tokens) + request.sampling.max_tokens
            if (
                not request.prompt_tokens
                or max(request.prompt_tokens) >= config.vocab_size
                or min(request.prompt_tokens) < 0
            ):
                raise ConfigError(
                    f"request {request.request_id} has the prompt {request.prompt_tokens!s:.80}, but a prompt needs "
                    f"at least one token and ids from 0 to {config.vocab_size - 1}: check that "
                    "data.tokenizer.path belongs to the model."
                )
            if length > config.max_position_embeddings:
                raise ConfigError(
                    f"request {request.request_id} needs {length} positions (a prompt of "
                    f"{len(request.prompt_tokens)} tokens and sampling.max_tokens = "
                    f"{request.sampling.max_tokens}), but the model has "
                    f"{config.max_position_embeddings}: lower data.max_prompt_tokens or "
                    "sampling.max_tokens."
                )

    def _require_model(self) -> PreTrainedModel:
        if self._model is None:
            raise EngineStateError("the sampler is closed: create a new one.")
        return self._model
