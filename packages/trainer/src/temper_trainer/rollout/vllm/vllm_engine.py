"""vLLM itself, inside a server process: requests in, completions out, weights taken between two steps."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vllm import LLM, RequestOutput, SamplingParams
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
from temper_trainer.types import Completion, FinishReason, SamplingRequest

RequestKey = tuple[int, int]
"""(number of the call, place in it)."""


@dataclass(slots=True, kw_only=True)
class _OpenRequest:
    """A request that vLLM works on."""

    request: SamplingRequest
    """What was asked."""
    tokens: list[int] = field(default_factory=list)
    """So far."""
    logprobs: list[float] = field(default_factory=list)
    """Of those."""


class VllmEngine:
    """One vLLM engine in this process; its workers may be further processes."""

    def __init__(self, spec: ServerSpec) -> None:
        self._spec = spec
        arguments = {name: _parse_argument(value) for name, value in spec.arguments.items()}
        if spec.files:
            for name, content in spec.files.items():
                (Path(spec.directory) / name).write_bytes(content)
            arguments["model"] = spec.directory
        self._is_cpu: bool = current_platform.is_cpu()
        if self._is_cpu:
            if spec.sleep_level:
                raise ConfigError(
                    f"rollout.vllm.sleep_level is {spec.sleep_level}, but vLLM can't sleep on a CPU: set it to 0."
                )
            arguments["enforce_eager"] = True
            # A prompt that is computed in pieces makes vLLM (0.27.1 and 0.32.0) rewind the seeded
            # generator of its request, which generators on a CPU refuse.
            if "max_num_batched_tokens" not in arguments:
                arguments.setdefault("enable_chunked_prefill", False)
        worker = f"{weight_transfer.__name__}.{weight_transfer.WorkerExtension.__name__}"
        self._llm = LLM(
            **arguments,
            weight_transfer_config={"backend": weight_transfer.BACKEND_NAME},
            worker_extension_cls=worker,
        )
        self._engine = self._llm.llm_engine
        self._llm.init_weight_transfer_engine({"init_info": {}})
        self._open: dict[str, tuple[RequestKey, _OpenRequest]] = {}
        self._adapter: LoRARequest | None = None
        self._is_asleep = False
        self._set_version(0)

    def ready(self) -> Ready:
        """What the client logs."""
        return Ready(device=current_platform.device_type)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to step for."""
        return not self._engine.has_unfinished_requests()

    def version(self) -> int:
        """Of the weights held now, as every worker says that holds some.

        Raises:
            WeightError: workers hold different ones.
        """
        versions: set[int] = set(self._llm.collective_rpc("temper_weight_version"))
        if len(versions) != 1:
            raise WeightError(
                f"vLLM's workers hold weights of different versions: {', '.join(map(str, sorted(versions)))}."
            )
        return versions.pop()

    def places(self) -> list[tuple[str, str | None]]:
        """Host and GPU of every worker, as Place has them."""
        found: list[tuple[str, str | None]] = self._llm.collective_rpc("temper_device_location")
        return found

    def add(self, key: RequestKey, request: SamplingRequest) -> None:
        """Begin a request."""
        sampling = request.sampling
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            stop=list(sampling.stop) or None,
            include_stop_str_in_output=True,
            detokenize=bool(sampling.stop),
            stop_token_ids=list(self._spec.end_token_ids),
            # The model's own idea of an end token may belong to another tokenizer.
            ignore_eos=True,
            seed=None if sampling.temperature == 0 else request.seed,
            logprobs=0,
            output_kind=RequestOutputKind.DELTA,
        )
        name = f"{key[0]}-{key[1]}"
        prompt = {"prompt_token_ids": list(request.prompt_tokens)}
        self._engine.add_request(name, prompt, params, lora_request=self._adapter)
        self._open[name] = (key, _OpenRequest(request=request))

    def step(self) -> list[tuple[RequestKey, Completion]]:
        """One scheduler step; the completions that it finished."""
        finished = []
        for output in self._engine.step():
            key, state = self._open[output.request_id]
            reason = _append_output(state, output)
            if reason is not None:
                del self._open[output.request_id]
                finished.append((key, self._completion(state, reason)))
        return finished

    def interrupt(self) -> list[tuple[RequestKey, Completion]]:
        """Stop every request; what each has so far, which may be no token."""
        left, self._open = self._open, {}
        self._engine.abort_request(list(left))
        return [
            (key, self._completion(state, FinishReason.INTERRUPTED)) for key, state in left.values()
        ]

    def logprobs(self, tokens: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs of every token but the first of each sequence, at temperature 1; nothing else may be open."""
        self._check_closed()
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        prompts = [{"prompt_token_ids": list(row)} for row in tokens]
        outputs = self._llm.generate(prompts, params, use_tqdm=False, lora_request=self._adapter)
        return [
            [
                places[token].logprob
                for places, token in zip(output.prompt_logprobs[1:], row[1:], strict=True)
            ]
            for output, row in zip(outputs, tokens, strict=True)
        ]

    def judge(self, rows: Sequence[tuple[Sequence[int], int]], top_k: int) -> list[PromptLogprobs]:
        """As a teacher: of each sequence, from its given position on, log-probs of its tokens and the likeliest ``top_k``.

        Returns:
            For each row: [N] log-probs, [N][top_k] token ids, likeliest first, and [N][top_k] their log-probs.
        """
        self._check_closed()
        params = SamplingParams(
            temperature=0, max_tokens=1, prompt_logprobs=top_k, detokenize=False
        )
        prompts = [{"prompt_token_ids": list(tokens)} for tokens, _ in rows]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        found = []
        for output, (tokens, first) in zip(outputs, rows, strict=True):
            places = output.prompt_logprobs[first:]
            given = [
                place[token].logprob for place, token in zip(places, tokens[first:], strict=True)
            ]
            ranked = [
                sorted(place.items(), key=lambda item: (-item[1].logprob, item[0]))[:top_k]
                for place in places
            ]
            found.append(
                (
                    given,
                    [[i for i, _ in row] for row in ranked],
                    [[entry.logprob for _, entry in row] for row in ranked],
                )
            )
        return found

    def join_channel(self, channel: ChannelSpec) -> None:
        """Let every worker join the trainer's channel."""
        self._llm.init_weight_transfer_engine({"init_info": {"channel": channel.to_dict()}})

    def start_update(self) -> None:
        """Before the first bucket of a set."""
        self._check_closed()
        if self._is_asleep:
            self._engine.wake_up(tags=["weights"])
        self._llm.start_weight_update()

    def update(self, parcel: PackedBucket) -> None:
        """Load one bucket."""
        self._update({"parcel": parcel})

    def finish_update(self, version: int) -> int:
        """After the last bucket; returns the version that the workers now report."""
        self._llm.finish_weight_update()
        self._set_version(version)
        return self._renewed()

    def load_files(self, parcels: Sequence[PackedBucket], version: int) -> int:
        """A whole set through shared memory; every checksum is compared before the first weight is touched."""
        for parcel in parcels:
            check_digest(open_weight_file(parcel), parcel)
        self.start_update()
        for parcel in parcels:
            self.update(parcel)
        return self.finish_update(version)

    def load_delta(self, parcels: Sequence[PackedBucket], manifest: DeltaManifest) -> int:
        """A whole set in shared memory with its changes; what this server held before does not matter."""
        for changes in manifest.parcels:
            open_delta_file(changes)
        self.start_update()
        versions = (manifest.version, manifest.base_version)
        for parcel, changes in zip(parcels, manifest.parcels, strict=True):
            self._update({"parcel": parcel, "changes": changes, "versions": versions})
        return self.finish_update(manifest.version)

    def receive_weights(
        self, parcels: Sequence[PackedBucket], version: int, keep_copy: bool = False
    ) -> int:
        """A whole set through the trainer's channel.

        Args:
            parcels: what comes.
            version: of the set.
            is_held: keep it, so that ``receive_changes`` can follow.
        """
        self.start_update()
        for parcel in parcels:
            self._update({"parcel": parcel, "keep_copy": keep_copy})
        return self.finish_update(version)

    def cached_version(self) -> int:
        """Of the weights whose changes every worker can take; -1 where one of them can't."""
        held: set[int] = set(self._llm.collective_rpc("temper_cached_version"))
        return held.pop() if len(held) == 1 else -1

    def receive_delta(
        self, parcels: Sequence[PackedBucket], base_version: int, version: int
    ) -> int:
        """Changes of every bucket of the set that is held, through the trainer's channel.

        Raises:
            StaleBaseError: another set is held, or none.
        """
        held = self.cached_version()
        if held != base_version:
            raise StaleBaseError(
                f"changes of weights {base_version} came, but {'none are' if held < 0 else f'weights {held} are'} held."
            )
        self.start_update()
        for place, parcel in enumerate(parcels):
            self._update(
                {
                    "parcel": parcel,
                    "place": place,
                    "is_changed": True,
                    "versions": (version, base_version),
                }
            )
        return self.finish_update(version)

    def load_adapter(self, directory: str, version: int) -> int:
        """A LoRA adapter under a new name and number; vLLM keeps the old one under the old number, which goes.

        Raises:
            WeightError: vLLM does not take it.
        """
        self._check_closed()
        if self._is_asleep:
            self._engine.wake_up(tags=["weights"])
        adapter = LoRARequest(f"version-{version}", version, directory)
        if not self._engine.add_lora(adapter):
            raise WeightError(
                f"vLLM did not take the adapter of version {version} from {directory}."
            )
        if self._adapter is not None:
            self._engine.remove_lora(self._adapter.lora_int_id)
        self._adapter = adapter
        self._set_version(version)
        return self._renewed()

    def sleep(self) -> None:
        """Give memory back until the next weights come."""
        self._check_closed()
        self._engine.reset_prefix_cache()
        self._engine.sleep(level=self._spec.sleep_level)
        self._is_asleep = True

    def wake(self) -> None:
        """Take memory again, with the weights that were there; after level 2 they must be sent."""
        if self._is_asleep:
            self._engine.wake_up()
            self._is_asleep = False

    def _update(self, info: Mapping[str, object]) -> None:
        """One bucket, as UpdateInfo has it."""
        self._llm.update_weights({"update_info": dict(info)})

    def _renewed(self) -> int:
        """After any new weights: nothing computed with the old ones may be used again."""
        if self._is_asleep:
            self._engine.wake_up(tags=["kv_cache"])
            self._is_asleep = False
        if not self._engine.reset_prefix_cache():
            raise WeightError("vLLM could not empty its prefix cache after new weights.")
        return self.version()

    def _set_version(self, version: int) -> None:
        self._llm.collective_rpc("set_temper_weight_version", args=(version,))

    def _check_closed(self) -> None:
        if self._open:
            raise WeightError(
                f"{len(self._open)} requests are being sampled: interrupt them first."
            )

    def _completion(self, state: _OpenRequest, reason: FinishReason) -> Completion:
        return Completion(
            request_id=state.request.request_id,
            tokens=tuple(state.tokens),
            rollout_logprobs=tuple(state.logprobs),
            finish_reason=reason,
            weight_version=self.version(),
        )


def _append_output(state: _OpenRequest, output: RequestOutput) -> FinishReason | None:
    """Add what a step brought; why the request ended, where it did."""
    (part,) = output.outputs
    state.tokens += part.token_ids
    if part.token_ids:
        state.logprobs += [
            places[token].logprob
            for places, token in zip(part.logprobs, part.token_ids, strict=True)
        ]
    if part.finish_reason is None:
        return None
    if part.finish_reason == "length":
        return FinishReason.MAX_TOKENS
    return FinishReason.STOP_TEXT if isinstance(part.stop_reason, str) else FinishReason.END_TOKEN


def _parse_argument(value: object) -> object:
    """An argument as vLLM takes it; a text that begins with a bracket is JSON."""
    return json.loads(value) if isinstance(value, str) and value.startswith(("{", "[")) else value
