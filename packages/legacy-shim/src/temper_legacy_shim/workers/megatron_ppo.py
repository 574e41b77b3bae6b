"""Computations of ``MegatronPPOActor`` and ``MegatronPPOCritic`` on an engine.

Where their numbers differ from the FSDP classes': every micro-batch of an update weighs the same,
however many rows it has; the only update of a call is no exception; losses are listed by
micro-batch, the policy's without the entropy term; the critic's mask is the attention mask. Facts
from verl's ``workers/actor/megatron_actor.py`` and ``workers/critic/megatron_critic.py`` of January
2026.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from temper_engine_api.engine import BaseEngine
from temper_engine_api.errors import BatchError, CapabilityError, ConfigError
from temper_legacy_shim.data_proto import DataProto
from temper_legacy_shim.workers.batches.settings import block
from temper_legacy_shim.workers.batches.updates import SplitSettings
from temper_legacy_shim.workers.engine.adopted_models import Adopted, adopt
from temper_legacy_shim.workers.engine.engine_configs import adopted_config
from temper_legacy_shim.workers.engine.on_engine import OnEngine, from_replica, needed_column
from temper_legacy_shim.workers.ppo_actor import PPOActor
from temper_legacy_shim.workers.ppo_critic import PPOCritic

_INPUTS = ("responses", "input_ids", "attention_mask", "position_ids")
_ACTOR_COLUMNS = (*_INPUTS, "response_mask", "old_log_probs", "advantages")
_ACTOR_EXTRAS = ("rollout_is_weights", "rollout_log_probs")
_CRITIC_COLUMNS = (*_INPUTS, "values", "returns")


class _OnMegatron(OnEngine):
    """Actor and critic on the adopted engine, with micro-batches of equal weight."""

    lists_losses = True

    def _adopt(
        self,
        module: nn.Module | BaseEngine,
        optimizer: torch.optim.Optimizer | None,
        *,
        grad_clip: float | None,
    ) -> Adopted:
        configure = adopted_config(block(self._values, "megatron"))
        return adopt(
            module,
            optimizer,
            grad_clip=grad_clip,
            model_type=self.model_type,
            engine_name="megatron",
            configure=configure,
        )

    @property
    def split(self) -> SplitSettings:
        """Sizes of an update, adapted to the layout."""
        multiple = self.engine.topology.plan_constraints.micro_batch_multiple
        return replace(
            super().split,
            ulysses_sequence_parallel_size=self.ranks_per_sequence,
            micro_batch_multiple=multiple,
        )

    def _mini_batches(self, data: DataProto, *, columns: Sequence[str]) -> Iterator[DataProto]:
        """Yield the rows of every update, shuffled as torch's DataLoader with that seed."""
        split = self.split
        if len(data) == 0 or len(data) % split.ppo_mini_batch_size:
            raise BatchError(
                f"the batch has {len(data)} rows, but must be a multiple of ppo_mini_batch_size, "
                f"{split.ppo_mini_batch_size}."
            )
        chosen = data.select(batch_keys=list(columns), non_tensor_batch_keys=[])
        seed, shuffles = (
            self._values.get("data_loader_seed"),
            bool(self._values.get("shuffle", False)),
        )
        if shuffles and not isinstance(seed, int):
            raise ConfigError(
                f"shuffle is set, but data_loader_seed is {seed!r}: give a whole number, so that "
                "all ranks draw the same order."
            )
        loader: DataLoader[int] = DataLoader(
            range(len(data)),  # type: ignore[arg-type]  # anything with a length and items
            batch_size=split.ppo_mini_batch_size,
            shuffle=shuffles,
            generator=torch.Generator().manual_seed(seed) if isinstance(seed, int) else None,
            collate_fn=list,
        )
        return (chosen.select_idxs(rows) for _ in range(split.ppo_epochs) for rows in loader)

    def _micro_batches(self, mini_batch: DataProto) -> Iterator[tuple[DataProto, float, bool]]:
        """Yield micro-batches that weigh the same, however many rows each has."""
        # Megatron's schedule divided the loss by the number of micro-batches, not by rows.
        weight = 1 / len(self.split.micro_batches(mini_batch))
        for part, _, is_empty in super()._micro_batches(mini_batch):
            yield part, weight, is_empty

    def forward_backward_batch(self, *_: object, **__: object) -> None:
        """Raise an error: the engine runs the passes."""
        raise CapabilityError(
            f"{type(self).__name__}.forward_backward_batch() ran Megatron's schedule on chunks "
            "that no longer exist: call "
            "engine.forward_backward_batch(), or the update and compute methods of this class."
        )


class MegatronActor(_OnMegatron, PPOActor):
    """The old Megatron actor on an engine, without its warning."""

    def compute_log_prob(  # type: ignore[override]  # the old class returned another kind than its FSDP sibling
        self, data: DataProto, calculate_entropy: bool = False
    ) -> tuple[Tensor, Tensor, None]:
        """Compute log-probs and entropies [B, W], equal on all ranks of a replica.

        Entropies are empty if not requested.

        Args:
            data: as ``DataParallelPPOActor.compute_log_prob`` takes it.
            calculate_entropy: return entropies too.

        Returns:
            Both, and None in the place of expert choices, which nothing here replays.
        """
        result = self.score_rows(data, calculate_entropy=calculate_entropy)
        return result["log_probs"], result.get("entropys", torch.empty(0)), None

    def make_minibatch_iterator(self, data: DataProto) -> Iterable[DataProto]:
        """Return the mini-batches of every pass, as ``update_policy`` takes them."""
        columns = [*_ACTOR_COLUMNS, *(("ref_log_prob",) if self.settings.use_kl_loss else ())]
        if data.batch is not None:
            columns += [name for name in _ACTOR_EXTRAS if name in data.batch]
        return self._mini_batches(data, columns=columns)

    def update_policy(  # type: ignore[override]
        self, dataloader: Iterable[DataProto], enable_mtp: bool = False
    ) -> dict[str, object]:
        """Return one optimizer step for each mini-batch.

        Args:
            dataloader: the result of ``make_minibatch_iterator``.
            enable_mtp: rejected if True, because multi-token prediction is not available.

        Returns:
            Metrics by their old names, a list each with an entry for each micro-batch or update, on
            every rank of a replica.
        """
        if enable_mtp:
            raise CapabilityError(
                "enable_mtp is set, but no engine trains multi-token predictors: set it to False."
            )
        # The old class computed the ratio also where a call made a single update.
        metrics = self._run_updates((mini_batch, False) for mini_batch in dataloader)
        return from_replica(self.engine, metrics)

    def update_on_rows(self, data: DataProto) -> dict[str, object]:
        """Train on this rank's rows, as the worker around the class does."""
        return self.update_policy(self.make_minibatch_iterator(data))


class MegatronCritic(_OnMegatron, PPOCritic):
    """The old Megatron critic on an engine, without its warning."""

    def compute_values(self, data: DataProto) -> Tensor:
        """Compute values [B, W], 0 at padding, equal on all ranks of a replica."""
        # Without a response_mask, which the old class did not apply.
        return super().compute_values(
            data.select(batch_keys=list(_INPUTS), non_tensor_batch_keys=[])
        )

    def make_minibatch_iterator(self, data: DataProto) -> Iterable[DataProto]:
        """Return the mini-batches of every pass, as ``update_critic`` takes them."""
        return self._mini_batches(data, columns=_CRITIC_COLUMNS)

    def update_critic(self, dataloader: Iterable[DataProto]) -> dict[str, object]:  # type: ignore[override]
        """Take one step per mini-batch; metrics as ``MegatronPPOActor.update_policy``."""
        chosen = (
            mini_batch.select(batch_keys=list(_CRITIC_COLUMNS), non_tensor_batch_keys=[])
            for mini_batch in dataloader
        )
        return from_replica(self.engine, self._run_updates(chosen))

    def update_on_rows(self, data: DataProto) -> dict[str, object]:
        """Train on this rank's rows, as the worker around the class does."""
        return self.update_critic(self.make_minibatch_iterator(data))

    def forward_sizes(self, config: Mapping[str, object], *, num_ranks: int) -> dict[str, object]:
        """Return the sizes of a worker's forward pass: the old one took those of the update."""
        total, size = (
            config.get(name) for name in ("ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu")
        )
        return {
            **super().forward_sizes(config, num_ranks=num_ranks),
            "micro_batch_size": total // num_ranks if isinstance(total, int) else size,
        }

    def _trained_tokens(self, part: DataProto, values: Tensor) -> Tensor:
        """Return the attention mask of the response, which the old class trained on."""
        return needed_column(part, "attention_mask", like=values)[:, -values.shape[1] :]
