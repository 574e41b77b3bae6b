"""Shared parts of the deprecated actor and critic.

Engine, update sizes, columns of the old batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from temper_engine_api.engine import BaseEngine
from temper_engine_api.errors import BatchError, ConfigError
from temper_engine_api.specs import ModelType
from temper_engine_fsdp.config import FSDPConfig
from temper_legacy_shim.data_proto import DataProto
from temper_legacy_shim.workers.engines import Adopted, adopt
from temper_legacy_shim.workers.settings import known, plain
from temper_legacy_shim.workers.updates import SplitSettings

Numerics = Literal["legacy", "temper"]


class OnEngine(ABC):
    """A deprecated model class whose passes run on an engine."""

    model_type: ClassVar[ModelType]
    """The head that it trains."""
    _adopted: Adopted
    """The engine, and what it was made from; set by the class after its configuration."""

    def __init__(self, config: object, *, numerics: Numerics) -> None:
        if numerics not in ("legacy", "temper"):
            raise ConfigError(f"numerics is {numerics!r}, but must be legacy or temper.")
        self.config = config
        self.numerics = numerics
        self._values: dict[str, object] = {}
        self.configure(plain(config))

    @abstractmethod
    def configure(self, values: Mapping[str, object]) -> None:
        """Take a config's values for the updates to come; what the engine was built with stays."""

    def _adopt(self, module: nn.Module | BaseEngine, optimizer: torch.optim.Optimizer | None, *, grad_clip: float | None) -> Adopted:
        """Return an engine for what the constructor was given. Collective."""
        return adopt(module, optimizer, grad_clip=grad_clip, model_type=self.model_type, engine_name="fsdp", configure=FSDPConfig)

    @property
    def engine(self) -> BaseEngine:
        return self._adopted.engine

    @property
    def ranks_per_sequence(self) -> int:
        """Ranks that share one sequence; each brings its tokens to a budget."""
        return self.engine.topology.sp.size * self.engine.topology.cp.size

    @property
    def split(self) -> SplitSettings:
        """Sizes of an update; read when it is made, since a reference policy's config has none."""
        values: SplitSettings = known(SplitSettings, {"ppo_mini_batch_size": 0, **self._values})
        return values

    def _optimizer_step(self) -> float:
        """Take one optimizer step, and return the gradient norm before clipping.

        A non-finite one changes nothing.
        """
        return self.engine.optimizer_step()


def column_of(data: DataProto, name: str, *, like: Tensor) -> Tensor | None:
    """Return a column [B, W] next to ``like``, float32 unless it is the mask.

    None if the batch has none.
    """
    if data.batch is None or name not in data.batch:
        return None
    column = data.batch.column(name).to(like.device)
    return column if name == "response_mask" else column.float()


def needed_column(data: DataProto, name: str, *, like: Tensor) -> Tensor:
    """Return a column that an update requires; see ``column_of``.

    Raises:
        BatchError: the batch has none.
    """
    column = column_of(data, name, like=like)
    if column is None:
        raise BatchError(f"the batch has no {name}, which this update reads: add it [B, {like.shape[1]}].")
    return column
