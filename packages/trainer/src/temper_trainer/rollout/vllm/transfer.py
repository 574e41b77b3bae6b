"""Our weight-transfer engine inside vLLM's workers: it receives parcels through shared memory, or over a collective of its own.

Imported in every worker process, because vLLM is told to mix ``RegistersTransfer`` into its workers.
"""

from dataclasses import dataclass, field

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from temper_trainer.rollout.channel import Channel, open_channel
from temper_trainer.rollout.parcels import Parcel, check_digest, named_weights, open_parcel
from temper_trainer.rollout.place import place_of

NAME = "temper"
"""Under which vLLM finds the engine."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """How weights will come."""

    channel: dict[str, object] = field(default_factory=dict)
    """Of a ``ChannelSpec``; empty is shared memory."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One bucket."""

    parcel: Parcel
    """Its contents."""


class ParcelTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads parcels through vLLM's layerwise reload, which waits for all parts of a fused layer, whichever buckets they come in."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    _channel: Channel | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Join the trainer's channel, where there is one, in place of an earlier one."""
        if init_info.channel:
            self.shutdown()
            rank = self.parallel_config.rank
            self._channel = open_channel(init_info.channel, worker_rank=rank, device=self.device)

    def start_weight_update(self) -> None:
        """Before the first bucket."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load one bucket."""
        parcel = update_info.parcel
        if parcel.path is None:
            assert self._channel is not None
            data = self._channel.receive(parcel)
        else:
            data = open_parcel(parcel)
            check_digest(data, parcel)
        # A received buffer is used again for the next bucket, while a layer may still wait for its other parts.
        self.model.load_weights([(name, tensor if parcel.path else tensor.clone()) for name, tensor in named_weights(data, parcel)])

    def finish_weight_update(self) -> None:
        """After the last bucket."""
        finalize_layerwise_reload(self.model, self.model_config)

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


class RegistersTransfer:
    """Mixed into vLLM's workers: naming it makes them import this module.

    They also hold the version of their weights, because vLLM itself knows of one only since 0.27.
    """

    _temper_weight_version = 0
    device: torch.device
    """vLLM's own."""

    def temper_weight_version(self) -> int:
        """Of the weights in this worker."""
        return self._temper_weight_version

    def temper_place(self) -> tuple[str, str | None]:
        """Host and GPU of this worker, as Place has them."""
        place = place_of(self.device)
        return place.host, place.gpu

    def set_temper_weight_version(self, version: int) -> None:
        """After an update."""
        self._temper_weight_version = version


if NAME not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(NAME, ParcelTransferEngine)
