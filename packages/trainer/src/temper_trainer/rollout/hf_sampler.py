"""The ``hf`` sampler: continuous batching on a transformers model of its own, on any device."""

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
"""Log-probs of given tokens are computed for as many sequences at once as stay below this many logits."""


class HfSampler:
    """Completes prompts with a transformers model; see Sampler."""

    def __init__(
        self,
        *,
        model: ModelSpec,
        tokenizer: PreTrainedTokenizerBase,
        config: RolloutConfig,
        device: str | None = None,
        compute_lock: AbstractContextManager[object] | None = None,
    ) -> None:
        """Build the model with the spec's own weights, as version 0.

        Args:
            model: The model to build.
            tokenizer: Names the end token and decodes text to look for stop texts.
            config: Number of concurrent sequences, and dtype.
            device: None is CUDA where available.
            compute_lock: Held during every forward pass. Engines of the same process hold it while
                they change process-wide settings of torch; see InlineWorkerGroup.

        Raises:
            ConfigError: The model can't be built, or there is no end token.
        """
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._model: PreTrainedModel | None = build_model(
            model, dtype=_DTYPES[config.dtype], device=self._device
        )
        self._ends = find_end_token_ids(self._model, model, tokenizer_end=tokenizer.eos_token_id)
        self._tokenizer = tokenizer
        self._config = config
        self._version = 0
        self._interrupted = threading.Event()
        self._compute_lock = compute_lock or nullcontext()

    @property
    def weight_version(self) -> int:
        """Of the weights held now; 0 until the first load."""
        return self._version

    @torch.inference_mode()
    def sample(self, requests: Sequence[SamplingRequest]) -> list[Completion]:
        """One completion per request, in the order of the requests; see Sampler."""
        model = self._open_model()
        self._check(requests, model)
        decoding = ContinuousBatchDecoder(
            requests,
            model=model,
            tokenizer=self._tokenizer,
            ends=self._ends,
            max_concurrent=self._config.max_concurrent,
            weight_version=self._version,
            is_interrupted=self._interrupted.is_set,
            compute_lock=self._compute_lock,
        )
        return decoding.run()

    def interrupt(self) -> None:
        """Let open and further calls return at once with what they have, until the next weights."""
        self._interrupted.set()

    def load_weights(self, stream: Iterable[NamedWeight], *, version: int) -> None:
        """Take a whole set of weights; see Sampler."""
        load_weights(self._open_model(), stream)
        self._version = version
        self._interrupted.clear()

    def load_delta(
        self, buckets: Sequence[DeltaBucket], *, base_version: int, version: int
    ) -> None:
        """Take what changed since the weights that are held; on an error they stay as they are.

        Raises:
            StaleBaseError: other weights are held.
            WeightError: a bucket is damaged or does not fit.
        """
        if self._version != base_version:
            raise StaleBaseError(
                f"changes of weights {base_version} came, but the sampler holds weights {self._version}."
            )
        load_delta(self._open_model(), buckets)
        self._version = version
        self._interrupted.clear()

    @torch.inference_mode()
    def logprobs(self, tokens: Sequence[Sequence[int]], *, temperature: float) -> list[list[float]]:
        """Log-probs of every token but the first of each sequence, from whole sequences at once; see Sampler."""
        model = self._open_model()
        longest = max(len(sequence) for sequence in tokens)
        rows = max(1, _MAX_LOGITS // (longest * model.config.get_text_config().vocab_size))
        found: list[list[float]] = []
        for first in range(0, len(tokens), rows):
            chosen = tokens[first : first + rows]
            with self._compute_lock:
                values = self._teacher_forced(model, chosen, temperature=temperature)
            found += [
                row[: len(sequence) - 1]
                for row, sequence in zip(values.tolist(), chosen, strict=True)
            ]
        return found

    def close(self) -> None:
        """Free the model."""
        self._model = None

    def _teacher_forced(
        self, model: PreTrainedModel, tokens: Sequence[Sequence[int]], *, temperature: float
    ) -> Tensor:
        """[B, L - 1] float32 log-probs of sequences padded on the right."""
        padded = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(sequence) for sequence in tokens], batch_first=True
        ).to(self._device)
        places = torch.arange(padded.shape[1], device=self._device).expand_as(padded)
        logits = model(
            input_ids=padded, position_ids=places, use_cache=False, slots=CausalAttention()
        ).logits
        tempered = logits[:, :-1].float() / temperature
        chosen: Tensor = tempered.gather(-1, padded[:, 1:, None])[..., 0] - tempered.logsumexp(-1)
        return chosen

    def _check(self, requests: Sequence[SamplingRequest], model: PreTrainedModel) -> None:
        config = model.config.get_text_config()
        if len({request.request_id for request in requests}) != len(requests):
            raise ConfigError("two sampling requests share a request_id: give each its own.")
        for request in requests:
            length = len(request.prompt_tokens) + request.sampling.max_tokens
            if (
                not request.prompt_tokens
                or max(request.prompt_tokens) >= config.vocab_size
                or min(request.prompt_tokens) < 0
            ):
                raise ConfigError(
                    f"request {request.request_id}: a prompt needs at least one token, all from 0 to {config.vocab_size - 1}, "
                    f"but is {request.prompt_tokens!s:.80}: does the tokenizer belong to the model?"
                )
            if length > config.max_position_embeddings:
                raise ConfigError(
                    f"request {request.request_id}: a prompt of {len(request.prompt_tokens)} tokens and sampling.max_tokens "
                    f"{request.sampling.max_tokens} make {length}, but the model has {config.max_position_embeddings} positions: "
                    "lower data.max_prompt_tokens or sampling.max_tokens."
                )

    def _open_model(self) -> PreTrainedModel:
        if self._model is None:
            raise EngineStateError("this sampler was closed: make another.")
        return self._model
