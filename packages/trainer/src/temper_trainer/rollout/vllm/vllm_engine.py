"""The vLLM engine inside a server process."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from vllm import LLM, RequestOutput, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from temper_engine_api.errors import ConfigError, WeightError
from temper_trainer.rollout.packed_bucket import PackedBucket, check_digest, open_weight_file
from temper_trainer.rollout.vllm import weight_transfer
from temper_trainer.rollout.vllm.messages import Ready, ServerSpec
from temper_trainer.rollout.vllm.server_methods import PromptLogprobs
from temper_trainer.rollout.weight_channel import ChannelSpec
from temper_trainer.rollout.weight_delta import DeltaManifest, StaleBaseError, open_delta_file
from temper_trainer.types import Completion, FinishReason, RefusedRequestError, SamplingRequest

RequestKey = tuple[int, int]
"""Number of the `sample` call, and the request's index in it."""


@dataclass(slots=True, kw_only=True)
class _OpenRequest:
    """A request that vLLM has not finished."""

    request: SamplingRequest
    tokens: list[int] = field(default_factory=list)
    """Token ids that were sampled so far."""
    logprobs: list[float] = field(default_factory=list)
    experts: Tensor | None = None
    """See `Completion.routed_experts`; set when it has finished."""


class VllmEngine:
    """One vLLM engine in this process; its workers may be in other processes."""

    def __init__(self, spec: ServerSpec) -> None:
        self._spec = spec
        arguments = {name: _parse_argument(value) for name, value in spec.arguments.items()}
        if spec.files:
            for name, content in spec.files.items():
                (Path(spec.directory) / name).write_bytes(content)
            arguments["model"] = spec.directory
        if spec.has_expert_choices:
            arguments["enable_return_routed_experts"] = True
        self._is_cpu: bool = current_platform.is_cpu()
        if self._is_cpu:
            if spec.sleep_level:
                raise ConfigError(
                    f"rollout.vllm.sleep_level is {spec.sleep_level}, but vLLM cannot sleep on a "
                    "CPU: set it to 0."
                )
            arguments["enforce_eager"] = True
            # Chunked prefill makes vLLM (0.27.1 and 0.32.0) rewind the seeded generator of a
            # request, which CPU generators do not support.
            if "max_num_batched_tokens" not in arguments:
                arguments.setdefault("enable_chunked_prefill", False)
        worker = f"{weight_transfer.__name__}.{weight_transfer.WorkerExtension.__name__}"
        self._llm = LLM(
            **arguments,
            weight_transfer_config={"backend": weight_transfer.BACKEND_NAME},
            worker_extension_cls=worker,
        )
        # vLLM starts workers from this thread, which PR_SET_PDEATHSIG watches and which never ends.
        self._llm.collective_rpc("end_with_temper_server", args=(os.getpid(),))
        self._engine = self._llm.llm_engine
        self._llm.init_weight_transfer_engine({"init_info": {}})
        self._expert_layers = self._find_expert_layers() if spec.has_expert_choices else []
        self._open: dict[str, tuple[RequestKey, _OpenRequest]] = {}
        self._adapter: LoRARequest | None = None
        self._is_asleep = False
        self._set_version(0)

    def ready(self) -> Ready:
        """Return the message that ends the start."""
        return Ready(device=current_platform.device_type)

    @property
    def is_idle(self) -> bool:
        """True if no request is unfinished."""
        return not self._engine.has_unfinished_requests()

    def version(self) -> int:
        """Return the version of the weights, which all workers must agree on.

        Raises:
            WeightError: If workers have different versions.
        """
        versions: set[int] = set(self._llm.collective_rpc("temper_weight_version"))
        if len(versions) != 1:
            raise WeightError(
                "vLLM's workers have different weight versions: "
                f"{', '.join(map(str, sorted(versions)))}."
            )
        return versions.pop()

    def device_locations(self) -> list[tuple[str, str | None]]:
        """Return host and GPU for each worker, see DeviceLocation."""
        locations: list[tuple[str, str | None]] = self._llm.collective_rpc("temper_device_location")
        return locations

    def add(self, key: RequestKey, request: SamplingRequest) -> None:
        """Start a request.

        Raises:
            RefusedRequestError: If vLLM does not accept it.
        """
        sampling = request.sampling
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            stop=list(sampling.stop) or None,
            # Keep the stop text: the policy has sampled its tokens, so they must be trained like
            # all other tokens.
            include_stop_str_in_output=True,
            # The trainer decodes the tokens itself; only a stop text has to be found here.
            detokenize=bool(sampling.stop),
            stop_token_ids=list(self._spec.end_token_ids),
            # The end token in the model's config may belong to another tokenizer.
            ignore_eos=True,
            # Greedy decoding needs no random numbers, so pass no seed: vLLM samples requests with a
            # seed one by one, which is slower.
            seed=None if sampling.temperature == 0 else request.seed,
            # 0 returns the log-prob of the sampled token only, None would return none.
            logprobs=0,
            output_kind=RequestOutputKind.DELTA,
        )
        name = f"{key[0]}-{key[1]}"
        prompt = {"prompt_token_ids": list(request.prompt_tokens)}
        try:
            self._engine.add_request(name, prompt, params, lora_request=self._adapter)
        # Since vLLM 0.27, the latter is no ValueError.
        except (ValueError, VLLMValidationError) as error:
            message = f"vLLM refuses request {request.request_id}: {error}"
            raise RefusedRequestError(message, request.request_id) from error
        self._open[name] = (key, _OpenRequest(request=request))

    def step(self) -> list[tuple[RequestKey, Completion]]:
        """Run one scheduler step and return the completions that it finished."""
        finished = []
        for output in self._engine.step():
            key, state = self._open[output.request_id]
            reason = _append_output(state, output)
            if reason is not None and self._spec.has_expert_choices:
                state.experts = self._select_experts(output)
            if reason is not None:
                del self._open[output.request_id]
                finished.append((key, self._completion(state, reason)))
        return finished

    def interrupt(self, call: int | None = None) -> list[tuple[RequestKey, Completion]]:
        """Stop every request, or those of one call, and return its tokens so far, possibly none."""
        names = [name for name, (key, _) in self._open.items() if call is None or key[0] == call]
        stopped = [self._open.pop(name) for name in names]
        self._engine.abort_request(names)
        return [(key, self._completion(state, FinishReason.INTERRUPTED)) for key, state in stopped]

    def compute_logprobs(self, tokens: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-prob of every token but the first, at temperature 1.

        No request may be open, because `LLM.generate` would step it too.
        """
        self._check_idle()
        # vLLM must generate at least one token; only the log-probs of the prompt are used.
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        prompts = [{"prompt_token_ids": list(row)} for row in tokens]
        outputs = self._llm.generate(prompts, params, use_tqdm=False, lora_request=self._adapter)
        return [
            [
                by_token[token].logprob
                for by_token, token in zip(output.prompt_logprobs[1:], row[1:], strict=True)
            ]
            for output, row in zip(outputs, tokens, strict=True)
        ]

    def score_prompts(
        self, rows: Sequence[tuple[Sequence[int], int]], top_k: int
    ) -> list[PromptLogprobs]:
        """Return a teacher's log-probs of sequences.

        Args:
            rows: Token ids per sequence, and the first position to score.
            top_k: Number of most likely tokens to return for each position.

        Returns:
            For each row: [N] log-probs for its tokens, [N][top_k] ids of the most likely tokens in
            descending order, and [N][top_k] their log-probs.
        """
        self._check_idle()
        params = SamplingParams(
            temperature=0, max_tokens=1, prompt_logprobs=top_k, detokenize=False
        )
        prompts = [{"prompt_token_ids": list(tokens)} for tokens, _ in rows]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        results = []
        for output, (tokens, first) in zip(outputs, rows, strict=True):
            positions = output.prompt_logprobs[first:]
            token_logprobs = [
                by_token[token].logprob
                for by_token, token in zip(positions, tokens[first:], strict=True)
            ]
            # vLLM adds the token of the sequence to the top-k, so there may be one more than top_k.
            # Equal log-probs are ordered by id, so that the choice does not depend on vLLM's order.
            ranked = [
                sorted(by_token.items(), key=lambda item: (-item[1].logprob, item[0]))[:top_k]
                for by_token in positions
            ]
            results.append(
                (
                    token_logprobs,
                    [[i for i, _ in row] for row in ranked],
                    [[entry.logprob for _, entry in row] for row in ranked],
                )
            )
        return results

    def join_channels(self, channels: Sequence[ChannelSpec]) -> None:
        """Let every worker join its channel to the trainer; see `EngineMethods`."""
        specs = [channel.to_dict() for channel in channels]
        self._llm.init_weight_transfer_engine({"init_info": {"channels": specs}})

    def start_update(self) -> None:
        """Prepare the workers for a weight update, before its first bucket."""
        self._check_idle()
        # Wake up only the weights. Memory for the KV cache is allocated once the update is
        # complete.
        if self._is_asleep:
            self._engine.wake_up(tags=["weights"])
        self._llm.start_weight_update()

    def finish_update(self, version: int) -> int:
        """Finish after the last bucket; return the version that the workers now report."""
        self._llm.finish_weight_update()
        self._set_version(version)
        return self._drop_old_state()

    def load_files(self, buckets: Sequence[PackedBucket], version: int) -> int:
        """Load all weights from files; compare every checksum before any weight changes."""
        for bucket in buckets:
            check_digest(open_weight_file(bucket), bucket)
        self.start_update()
        for bucket in buckets:
            self._update({"bucket": bucket})
        return self.finish_update(version)

    def load_delta(self, buckets: Sequence[PackedBucket], manifest: DeltaManifest) -> int:
        """Load all weights and their delta from files.

        The weights that this server had before do not matter.
        """
        for delta in manifest.deltas:
            open_delta_file(delta)  # compares the checksum before any weight changes
        self.start_update()
        versions = (manifest.version, manifest.base_version)
        for bucket, delta in zip(buckets, manifest.deltas, strict=True):
            self._update({"bucket": bucket, "delta": delta, "versions": versions})
        return self.finish_update(manifest.version)

    def receive_weights(
        self, buckets: Sequence[PackedBucket], version: int, keep_copy: bool = False
    ) -> int:
        """Receive all weights through the trainer's channel.

        Args:
            buckets: Layout per bucket.
            version: Version of the weights.
            keep_copy: Keep a CPU copy, so that `receive_delta` can follow.
        """
        with self._leave_channel_on_error():
            self.start_update()
            for bucket in buckets:
                self._update({"bucket": bucket, "keep_copy": keep_copy})
            return self.finish_update(version)

    def cached_version(self) -> int:
        """Return the version that every worker can apply a delta to; -1 if one cannot."""
        versions: set[int] = set(self._llm.collective_rpc("temper_cached_version"))
        return versions.pop() if len(versions) == 1 else -1

    def receive_delta(
        self, buckets: Sequence[PackedBucket], base_version: int, version: int
    ) -> int:
        """Receive one delta per bucket through the trainer's channel.

        Raises:
            StaleBaseError: If the workers have no copy of `base_version`.
        """
        with self._leave_channel_on_error():
            cached = self.cached_version()
            if cached != base_version:
                raise StaleBaseError(
                    f"a delta relative to weights {base_version} arrived, but the server has a "
                    f"copy of {'no weights' if cached < 0 else f'weights {cached}'}."
                )
            self.start_update()
            for index, bucket in enumerate(buckets):
                self._update(
                    {
                        "bucket": bucket,
                        "index": index,
                        "is_delta": True,
                        "versions": (version, base_version),
                    }
                )
            return self.finish_update(version)

    def load_adapter(self, directory: str, version: int) -> int:
        """Load a LoRA adapter from a directory; return its version.

        Use the version as the adapter's id in vLLM. vLLM caches adapters by id, so with the same id
        it would keep the old adapter.

        Raises:
            WeightError: If vLLM refuses it.
        """
        self._check_idle()
        if self._is_asleep:
            self._engine.wake_up(tags=["weights"])
        adapter = LoRARequest(f"version-{version}", version, directory)
        if not self._engine.add_lora(adapter):
            raise WeightError(
                f"vLLM refused the adapter of version {version} in {directory}: look at the "
                "server's log."
            )
        if self._adapter is not None:
            self._engine.remove_lora(self._adapter.lora_int_id)
        self._adapter = adapter
        self._set_version(version)
        return self._drop_old_state()

    def sleep(self) -> None:
        """Free memory until the next weights arrive."""
        self._check_idle()
        self._engine.reset_prefix_cache()
        self._engine.sleep(level=self._spec.sleep_level)
        self._is_asleep = True

    def wake(self) -> None:
        """Allocate memory again; after sleep level 2 the weights must be sent again."""
        if self._is_asleep:
            self._engine.wake_up()
            self._is_asleep = False

    @contextmanager
    def _leave_channel_on_error(self) -> Iterator[None]:
        """Leave the trainer's channels after an error in the body.

        The sender and other servers may be waiting for this server, and would not notice its
        failure.
        """
        try:
            yield
        except Exception:
            self._llm.init_weight_transfer_engine({"init_info": {}})
            raise

    def _update(self, info: Mapping[str, object]) -> None:
        """Load one bucket; `info` has the fields of UpdateInfo."""
        self._llm.update_weights({"update_info": dict(info)})

    def _drop_old_state(self) -> int:
        """Drop everything that was computed with old weights; return the new version."""
        if self._is_asleep:
            self._engine.wake_up(tags=["kv_cache"])
            self._is_asleep = False
        # A prompt that was seen before must not reuse keys and values from old weights.
        if not self._engine.reset_prefix_cache():
            raise WeightError(
                "vLLM could not reset its prefix cache after a weight update: report this as a bug."
            )
        return self.version()

    def _set_version(self, version: int) -> None:
        self._llm.collective_rpc("set_temper_weight_version", args=(version,))

    def _check_idle(self) -> None:
        if self._open:
            raise WeightError(f"{len(self._open)} requests are open: interrupt them first.")

    def _completion(self, state: _OpenRequest, reason: FinishReason) -> Completion:
        return Completion(
            request_id=state.request.request_id,
            tokens=tuple(state.tokens),
            rollout_logprobs=tuple(state.logprobs),
            finish_reason=reason,
            weight_version=self.version(),
            routed_experts=state.experts,
        )

    def _find_expert_layers(self) -> list[int]:
        layers: list[int] = self._llm.collective_rpc("temper_expert_layers")[0]
        return layers

    def _select_experts(self, output: RequestOutput) -> Tensor:
        """Return the experts of a finished request in the layers that have some."""
        (part,) = output.outputs
        # vLLM has rows for all layers, in the narrowest type.
        return torch.from_numpy(part.routed_experts[:, self._expert_layers].astype("int16"))


def _append_output(state: _OpenRequest, output: RequestOutput) -> FinishReason | None:
    """Append a step's output; return the finish reason, or None."""
    (part,) = output.outputs
    state.tokens += part.token_ids
    if part.token_ids:
        state.logprobs += [
            by_token[token].logprob
            for by_token, token in zip(part.logprobs, part.token_ids, strict=True)
        ]
    if part.finish_reason is None:
        return None
    if part.finish_reason == "length":
        return FinishReason.MAX_TOKENS
    return FinishReason.STOP_TEXT if isinstance(part.stop_reason, str) else FinishReason.END_TOKEN


def _parse_argument(value: object) -> object:
    """Parse an argument that is JSON: a string that starts with a bracket."""
    return json.loads(value) if isinstance(value, str) and value.startswith(("{", "[")) else value
