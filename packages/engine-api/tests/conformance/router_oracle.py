"""The data-parallel oracle with a load-balancing loss of the routers of a MoE model."""

from dataclasses import dataclass

import torch
from data_parallel_oracle import DataParallelOracle

from temper_engine_api.specs import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(EngineConfig):
    router_aux_loss: float = 0.0


class RouterOracle(DataParallelOracle):
    """Add the loss of the Switch Transformer, arXiv:2101.03961, equation 4, to each micro-batch.

    It is weighted by the micro-batch's fraction of the trained tokens.
    """

    config_class = RouterConfig

    def _run_micro_batches(self, batch, *, micro_batch_loss, **arguments):
        def with_router_loss(head_outputs, micro):
            loss = micro_batch_loss(head_outputs, micro)
            weight = self.config.router_aux_loss * self._fraction(batch, micro)
            return loss + weight * self._compute_router_loss(micro) if weight else loss

        return super()._run_micro_batches(
            batch, micro_batch_loss=micro_batch_loss and with_router_loss, **arguments
        )

    def _fraction(self, batch, micro):
        return int(micro.loss_mask.sum()) / max(batch.denominators.tokens, 1)

    def _compute_router_loss(self, micro):
        config = self.model.config
        by_sequence = [
            self.model(
                input_ids=micro.select([b]).tokens[None], output_router_logits=True
            ).router_logits
            for b in range(micro.num_sequences)
        ]
        total = torch.zeros(())
        for layers in zip(*by_sequence, strict=True):
            probabilities = torch.cat([logits.flatten(0, -2) for logits in layers]).softmax(-1)
            chosen = probabilities.topk(config.num_experts_per_tok).indices
            hits = torch.zeros_like(probabilities).scatter(1, chosen, 1.0).mean(0)
            total = (
                total
                + config.num_experts
                * (hits / config.num_experts_per_tok * probabilities.mean(0)).sum()
            )
        return total
