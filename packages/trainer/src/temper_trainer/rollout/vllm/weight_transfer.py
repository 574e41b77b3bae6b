"""Temper's weight-transfer engine inside vLLM's workers.

It loads buckets from files in shared memory or receives them through a WeightChannel. Every worker
process imports this module, because vLLM mixes WorkerExtension into its workers.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from temper_engine_api.weights import NamedWeight
from temper_trainer.rollout.packed_bucket import (
    PackedBucket,
    check_digest,
    open_weight_file,
    unpack_tensors,
)
from temper_trainer.rollout.vllm.expert_capture import capture_experts_on_cpu, find_expert_layers
from temper_trainer.rollout.weight_channel import WeightChannel, join_channel, locate_device
from temper_trainer.rollout.weight_delta import (
    PackedDelta,
    apply_delta,
    check_updated_bucket,
    open_delta_file,
)

BACKEND_NAME = "temper"
"""Name under which vLLM finds the engine."""
_PR_SET_PDEATHSIG = 1


@dataclass
class InitInfo(WeightTransferInitInfo):
    """The way that weights will arrive."""

    channels: list[dict[str, object]] = field(default_factory=list)
    """Fields of a ChannelSpec for each worker; empty for shared memory."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One bucket, or the delta of one."""

    bucket: PackedBucket
    delta: PackedDelta | None = None
    """Delta on top of a bucket in a file."""
    index: int = 0
    """Position of the bucket in its set."""
    keep_copy: bool = False
    """Keep a CPU copy of a bucket from the channel, so that a delta can follow."""
    is_delta: bool = False
    """The channel carries the delta for a bucket that this worker has a copy of."""
    versions: tuple[int, int] = (0, 0)
    """Version after a delta, and version before it."""


class TemperTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads buckets through vLLM's layerwise reload.

    The reload collects all parts of a fused layer before it processes it, whichever buckets they
    arrive in. A delta is first applied to the full weights, and these are loaded: vLLM's own
    parameters may be fused, sharded or repacked, so element indices do not apply to them.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    _channel: WeightChannel | None = None
    _cached: list[list[Tensor]] | None = None
    """CPU copy of the current weights by bucket, if a delta may follow; None during an update."""
    _previous: list[list[Tensor]] | None = None
    """The CPU copy from before the current update."""
    _is_updating = False
    """True from the start of an update to its end; stays True if it fails."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Leave an earlier channel, and join the trainer's, if there is one."""
        self.shutdown()
        if init_info.channels:
            spec = init_info.channels[self.parallel_config.rank]
            self._channel = join_channel(spec, device=self.device)

    @property
    def has_cached_weights(self) -> bool:
        """True if a delta to the current weights can be applied."""
        return bool(self._cached)

    def start_weight_update(self) -> None:
        """Prepare for the first bucket."""
        # None until the update is complete: after an error, no delta fits a half-updated copy.
        self._previous, self._cached = self._cached, None
        self._arrived: list[list[Tensor]] = []
        if self._is_updating:
            # The previous update has failed. Layers of which a part was loaded would count it
            # twice, and be processed before they are complete.
            finalize_layerwise_reload(self.model, self.model_config)
        self._is_updating = True
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load one bucket."""
        if update_info.is_delta:
            weights = self._receive_delta(update_info)
        elif update_info.bucket.path is None:
            weights = self._receive_bucket(update_info)
        else:
            weights = _read_from_files(update_info)
        # vLLM's own loader fuses, shards and casts, so Hugging Face names are used.
        self.model.load_weights(weights)

    def _receive_bucket(self, info: UpdateInfo) -> list[NamedWeight]:
        assert self._channel is not None
        data = self._channel.receive(info.bucket)
        # Copied, because the buffer is reused for the next bucket while a fused layer may still
        # wait for its other parts.
        copy = data.to("cpu", copy=True) if info.keep_copy else data.clone()
        weights = list(unpack_tensors(copy, info.bucket))
        if info.keep_copy:
            self._arrived.append([weight.tensor for weight in weights])
        return weights

    def _receive_delta(self, info: UpdateInfo) -> list[NamedWeight]:
        assert self._channel is not None
        assert self._previous is not None
        tensors, entries = self._previous[info.index], info.bucket.entries
        delta, data = self._channel.receive_delta(entries)
        _apply_and_check(tensors, data, info, delta=delta)
        self._arrived.append(tensors)
        return [
            NamedWeight(entry.name, tensor) for entry, tensor in zip(entries, tensors, strict=True)
        ]

    def finish_weight_update(self) -> None:
        """Finish the layerwise reload after the last bucket."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _repack_tied_heads(self.model)
        self._cached, self._previous, self._arrived = self._arrived, None, []
        self._is_updating = False

    def shutdown(self) -> None:
        """Leave the channel."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    @staticmethod
    def trainer_send_weights(iterator: object, trainer_args: object) -> None:
        """Refuse: vLLM's interface also has the sender, but Temper's is in the trainer.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("temper_trainer.weight_sync sends weights.")


def _repack_tied_heads(model: torch.nn.Module) -> None:
    """Pack the weight of tied output heads again after the embedding was reloaded.

    In vLLM 0.32 (not in 0.27) a tied head is a separate module that shares the embedding's
    parameter. A set of weights names that parameter once, so the reload processes only the
    embedding. vLLM's CPU build multiplies with a packed copy of the weight, which it makes during
    that processing. Without this function the head would keep using the packed copy of the old
    weights.
    """
    packed: set[int] = set()
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if not isinstance(module, VocabParallelEmbedding) or not isinstance(
            method, UnquantizedEmbeddingMethod
        ):
            continue
        if id(module.weight) in packed:
            method.process_weights_after_loading(module)
        packed.add(id(module.weight))


def _read_from_files(info: UpdateInfo) -> list[NamedWeight]:
    """Return a bucket from its file with its delta applied; the file is not changed."""
    data = open_weight_file(info.bucket)
    if info.delta is None:
        check_digest(data, info.bucket)
    weights = list(unpack_tensors(data, info.bucket))
    if info.delta is not None:
        # No check_digest: the trainer may have applied an earlier delta to the file. The checksum
        # of the result covers both.
        tensors = [weight.tensor for weight in weights]
        _apply_and_check(tensors, open_delta_file(info.delta), info, delta=info.delta)
    return weights


def _apply_and_check(
    tensors: list[Tensor], data: Tensor, info: UpdateInfo, *, delta: PackedDelta
) -> None:
    version, base_version = info.versions
    apply_delta(tensors, data, info.bucket.entries, delta.counts)
    check_updated_bucket(tensors, delta.updated_digest, version=version, base_version=base_version)


class WorkerExtension:
    """Mixed into vLLM's workers, which makes them import this module.

    It stores the weight version, because vLLM has its own only since 0.27.
    """

    _temper_weight_version = 0
    device: torch.device
    """Attribute of vLLM's worker."""
    weight_transfer_engine: object
    """Attribute of vLLM's worker."""
    get_model: Callable[[], torch.nn.Module]
    """Method of vLLM's worker."""

    def temper_weight_version(self) -> int:
        """Return the version of this worker's weights."""
        return self._temper_weight_version

    def temper_cached_version(self) -> int:
        """Return the version that this worker can apply a delta to; -1 if it cannot."""
        engine = self.weight_transfer_engine
        can_apply = isinstance(engine, TemperTransferEngine) and engine.has_cached_weights
        return self._temper_weight_version if can_apply else -1

    def temper_device_location(self) -> tuple[str, str | None]:
        """Return host and GPU of this worker, see DeviceLocation."""
        location = locate_device(self.device)
        return location.host, location.gpu

    def temper_expert_layers(self) -> list[int]:
        """Return the indices of the layers with experts."""
        return find_expert_layers(self.get_model())

    def end_with_temper_server(self, server: int) -> None:
        """Have the kernel kill this worker when the server's process dies.

        vLLM's workers notice the server's death only between two calls. A worker that waits for
        weights or for another worker would never end.
        """
        # In the server's own process there is nothing to do, nor below another program such as Ray.
        if sys.platform == "linux" and os.getppid() == server:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != server:  # it died before prctl took effect
                os.kill(os.getpid(), signal.SIGKILL)

    def set_temper_weight_version(self, version: int) -> None:
        """Set the version after an update."""
        self._temper_weight_version = version


# vLLM has no public way to ask whether a name is registered, and refuses to register it twice.
if BACKEND_NAME not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND_NAME, TemperTransferEngine)
capture_experts_on_cpu()
