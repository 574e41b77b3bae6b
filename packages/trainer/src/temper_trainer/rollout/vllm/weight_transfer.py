"""Our weight-transfer engine inside vLLM's workers: it receives parcels through shared memory, or over a collective of its own.

Imported in every worker process, because vLLM is told to mix ``RegistersTransfer`` into its workers.
"""

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
from temper_trainer.rollout.device_location import locate_device
from temper_trainer.rollout.packed_bucket import (
    PackedBucket,
    check_digest,
    open_weight_file,
    unpack_tensors,
)
from temper_trainer.rollout.weight_channel import WeightChannel, join_channel
from temper_trainer.rollout.weight_delta import (
    PackedDelta,
    apply_delta,
    check_updated_bucket,
    open_delta_file,
)

BACKEND_NAME = "temper"
"""Under which vLLM finds the engine."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """How weights will come."""

    channel: dict[str, object] = field(default_factory=dict)
    """Of a ``ChannelSpec``; empty is shared memory."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One bucket, or what changed in it."""

    parcel: PackedBucket
    """Its contents."""
    changes: PackedDelta | None = None
    """On top of them, where the parcel is a file."""
    place: int = 0
    """Of the bucket in its set."""
    keep_copy: bool = False
    """Whether the bucket came through the channel in a set of which changes may come later: it stays in this worker."""
    is_changed: bool = False
    """Whether what comes through the channel are changes of the bucket that is held."""
    versions: tuple[int, int] = (0, 0)
    """Of the weights that changes lead to, and of those that they are changes of."""


class TemperTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads parcels through vLLM's layerwise reload, which waits for all parts of a fused layer, whichever buckets they come in.

    Changes are put into a whole set first, and that is loaded: vLLM may have fused, cut or packed what it holds itself.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    _channel: WeightChannel | None = None
    _held: list[list[Tensor]] | None = None
    """The set that came last, in buckets of tensors on the CPU, where changes of it may come; None while a set is under way."""
    _before: list[list[Tensor]] | None = None
    """What was held when the set began that is under way."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join the trainer's channel, where there is one, in place of an earlier one."""
        if init_info.channel:
            self.shutdown()
            rank = self.parallel_config.rank
            self._channel = join_channel(init_info.channel, worker_rank=rank, device=self.device)

    @property
    def has_cached_weights(self) -> bool:
        """Whether changes of the present weights can be taken."""
        return bool(self._held)

    def start_weight_update(self) -> None:
        """Before the first bucket."""
        self._before, self._held = self._held, None
        self._arrived: list[list[Tensor]] = []
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load one bucket."""
        if update_info.is_changed:
            weights = self._receive_changes(update_info)
        elif update_info.parcel.path is None:
            weights = self._receive_whole(update_info)
        else:
            weights = _read_from_files(update_info)
        self.model.load_weights(weights)

    def _receive_whole(self, info: UpdateInfo) -> list[NamedWeight]:
        assert self._channel is not None
        data = self._channel.receive(info.parcel)
        # A received buffer is used again for the next bucket, while a layer may still wait for its other parts.
        own = data.to("cpu", copy=True) if info.keep_copy else data.clone()
        weights = list(unpack_tensors(own, info.parcel))
        if info.keep_copy:
            self._arrived.append([weight.tensor for weight in weights])
        return weights

    def _receive_changes(self, info: UpdateInfo) -> list[NamedWeight]:
        assert self._channel is not None
        assert self._before is not None
        held, entries = self._before[info.place], info.parcel.entries
        changes, data = self._channel.receive_delta(entries)
        _apply_and_check(held, data, info, changes=changes)
        self._arrived.append(held)
        return [
            NamedWeight(entry.name, tensor) for entry, tensor in zip(entries, held, strict=True)
        ]

    def finish_weight_update(self) -> None:
        """Finish the layerwise reload after the last bucket."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _repack_tied_heads(self.model)
        self._held, self._before, self._arrived = self._arrived, None, []

    def shutdown(self) -> None:
        """Leave the channel."""
        if self._channel is not None:
            self._channel.close()

    @staticmethod
    def trainer_send_weights(iterator: object, trainer_args: object) -> None:
        """The trainer sends in its own way.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("temper_trainer.weight_sync sends.")


def _repack_tied_heads(model: torch.nn.Module) -> None:
    """Pack the weight of tied output heads again after the embedding was reloaded.

    In vLLM 0.32 (not in 0.27) a tied head is a module of its own that shares the embedding's
    parameter. A set of weights names that parameter once, so the reload processes the embedding
    alone. vLLM's CPU build multiplies with a copy of the weight that is packed in that processing:
    the head would keep computing with the copy of the old weights.
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
    """A bucket from its file, with its changes where there are some; the file stays as it is."""
    data = open_weight_file(info.parcel)
    if info.changes is None:
        check_digest(data, info.parcel)
    weights = list(unpack_tensors(data, info.parcel))
    if info.changes is not None:
        _apply_and_check(
            [weight.tensor for weight in weights],
            open_delta_file(info.changes),
            info,
            changes=info.changes,
        )
    return weights


def _apply_and_check(
    held: list[Tensor], data: Tensor, info: UpdateInfo, *, changes: PackedDelta
) -> None:
    version, base_version = info.versions
    apply_delta(held, data, info.parcel.entries, changes.counts)
    check_updated_bucket(held, changes.updated_digest, version=version, base_version=base_version)


class WorkerExtension:
    """Mixed into vLLM's workers: naming it makes them import this module.

    They also hold the version of their weights, because vLLM itself knows of one only since 0.27.
    """

    _temper_weight_version = 0
    device: torch.device
    """vLLM's own."""
    weight_transfer_engine: object
    """vLLM's own."""

    def temper_weight_version(self) -> int:
        """Of the weights in this worker."""
        return self._temper_weight_version

    def temper_cached_version(self) -> int:
        """Of the weights in this worker whose changes it can take; -1 where it can't."""
        engine = self.weight_transfer_engine
        return (
            self._temper_weight_version
            if isinstance(engine, TemperTransferEngine) and engine.has_cached_weights
            else -1
        )

    def temper_device_location(self) -> tuple[str, str | None]:
        """Host and GPU of this worker, as Place has them."""
        place = locate_device(self.device)
        return place.host, place.gpu

    def set_temper_weight_version(self, version: int) -> None:
        """After an update."""
        self._temper_weight_version = version


if BACKEND_NAME not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND_NAME, TemperTransferEngine)
