"""From the configuration's words to the contract's aggregation."""

from temper_engine_api.objective import Aggregation, AggregationMode
from temper_trainer.config.algorithm import AlgorithmConfig


def aggregation_of(config: AlgorithmConfig) -> Aggregation:
    """How the policy's per-token losses become one number; see ``AggregationMode``."""
    return Aggregation(mode=AggregationMode(config.aggregation), horizon=config.horizon)
