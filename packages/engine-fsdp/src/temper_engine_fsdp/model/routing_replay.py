"""Send tokens to given experts: replace the choice inside a router of transformers.

A router chooses experts with `torch.topk` over scores [T, E], and computes gate weights from its
logits at the chosen experts. Only that call's result is replaced, so gate weights keep the formula
and gradient of the router's family.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from temper_engine_api.batch import SequenceBatch, copy_to_device
from temper_engine_api.errors import BatchError, CapabilityError
from temper_engine_api.objective import ROUTED_EXPERTS
from temper_engine_fsdp.model.sequence_parallel import SequenceGroup


class ReplayedChoice(TorchFunctionMode):
    """Replaces the experts that a router chooses inside the context."""

    def __init__(self, choices: Tensor, *, num_experts: int) -> None:
        """Set the choices.

        Args:
            choices: [T, K] int64 experts per token, -1 where the router chooses.
            num_experts: Number of experts E.
        """
        super().__init__()
        self._choices = choices
        self._num_experts = num_experts
        self._num_replaced = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return torch's own result, or the given experts for the call that chooses experts."""
        options = kwargs or {}
        result = func(*args, **options)
        if func not in (torch.topk, Tensor.topk):
            return result
        scores, own = args[0], result.indices
        # DeepSeek's routers also call topk to choose groups of experts. Those scores have another
        # shape.
        if scores.shape != (len(self._choices), self._num_experts):
            return result
        if own.shape != self._choices.shape:
            raise BatchError(
                f"column {ROUTED_EXPERTS!r} has {self._choices.shape[1]} experts for each token "
                f"and layer, but the model chooses {own.shape[1]}: record the choices with the "
                "same model."
            )
        self._num_replaced += 1
        experts = torch.where(self._choices >= 0, self._choices, own)
        return torch.return_types.topk((scores.gather(1, experts), experts))

    def check(self, router: nn.Module) -> None:
        """Check that the router made exactly one choice.

        Raises:
            CapabilityError: If it chose in another way.
        """
        if self._num_replaced != 1:
            raise CapabilityError(
                f"{type(router).__name__} does not choose experts with one torch.topk over scores "
                f"of all experts, so column {ROUTED_EXPERTS!r} cannot be replayed: remove it."
            )


def take_choices(
    batch: SequenceBatch, *, sequence_group: SequenceGroup | None, device: torch.device
) -> Tensor | None:
    """Return the experts [layers, S, K] of this rank's tokens on the device; None without any.

    Args:
        batch: Micro-batch on the CPU.
        sequence_group: Ranks that share the tokens.
        device: Device of the model.
    """
    column = batch.columns.get(ROUTED_EXPERTS)
    if column is None:
        return None
    choices = column.long()
    # Dummies and padding have no choices, so that they are spread over experts.
    choices = torch.where(batch.is_dummy[batch.sequence_index][:, None, None], -1, choices)
    if sequence_group is not None:
        # The slice is padded with zeros.
        choices = sequence_group.take_slice((choices + 1).permute(1, 2, 0)).permute(2, 0, 1) - 1
    return copy_to_device(choices.transpose(0, 1).contiguous(), device)
