"""Record the experts that the routers of a transformers model choose, for routing replay."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from temper_engine_api.errors import ConfigError


class ExpertRecorder:
    """Records the choices of all routers in a model in every forward pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Find the routers, which return logits, gate weights and experts [rows, K].

        Raises:
            ConfigError: If the model has no such routers.
        """
        routers = [
            router
            for module in model.modules()
            if isinstance(getattr(module, "experts", None), nn.Module)
            for name in ("gate", "router")
            if isinstance(router := getattr(module, name, None), nn.Module)
            and type(router).__name__.lower().endswith("router")
        ]
        if not routers:
            raise ConfigError(
                f"rollout.routing_replay is sampler, but {type(model).__name__} has no routers of "
                "experts: set it to none."
            )
        self._choices: list[Tensor | None] = [None] * len(routers)
        for index, router in enumerate(routers):
            router.register_forward_hook(self._make_hook(index))

    def _make_hook(
        self, index: int
    ) -> Callable[[nn.Module, tuple[Tensor, ...], tuple[Tensor, Tensor, Tensor]], None]:
        def record(
            _: nn.Module, __: tuple[Tensor, ...], output: tuple[Tensor, Tensor, Tensor]
        ) -> None:
            self._choices[index] = output[2].to(torch.int16)

        return record

    def take(self, num_rows: int) -> Tensor:
        """Return the choices from the last pass over `num_rows` sequences padded to equal length.

        Returns:
            [num_rows, padded length, layers, K] int16 on the CPU.
        """
        choices = [layer for layer in self._choices if layer is not None]
        assert len(choices) == len(self._choices), "every router runs in every pass"
        self._choices = [None] * len(choices)
        by_row: Tensor = torch.stack(choices, dim=1).cpu().unflatten(0, (num_rows, -1))
        return by_row
