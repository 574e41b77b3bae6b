"""The reward model of a run: a frozen model with a score head, which a training engine runs."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from temper_engine_api.batch import from_sequences
from temper_engine_api.errors import ConfigError
from temper_engine_api.objective import HeadOutput
from temper_engine_api.plan import build_packed_batch, plan_mini_batch
from temper_engine_api.reduction import count_denominators
from temper_trainer.config.run import RoleConfig
from temper_trainer.runtime.placement import REWARD_MODEL_ROLE
from temper_trainer.runtime.teacher_factory import GroupFactory
from temper_trainer.runtime.worker_group import WorkerGroup
from temper_trainer.teacher.token_map import describe_token_difference


class EngineRewardModel:
    """Scores token sequences with the score head of a worker group."""

    def __init__(self, group: WorkerGroup, *, max_tokens: int) -> None:
        """Create a reward model.

        Args:
            group: An initialized worker group.
            max_tokens: Maximum number of tokens per micro-batch.
        """
        self._group = group
        self._max_tokens = max_tokens

    def score_rows(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Return each sequence's score, the head's output at its last token."""
        batch = from_sequences(
            [torch.tensor(row) for row in rows],
            loss_masks=[torch.arange(len(row)) == len(row) - 1 for row in rows],
        )
        group = self._group
        plan = plan_mini_batch(
            batch.lengths.tolist(),
            dp_size=group.dp_size,
            max_tokens=max(self._max_tokens, *(len(row) for row in rows)),
            constraints=group.topology.plan_constraints,
        )
        denominators = count_denominators(batch)
        parts = [
            build_packed_batch(batch, plan=plan, rank=rank, denominators=denominators)
            for rank in range(group.dp_size)
        ]
        outputs = group.forward(parts, outputs=[HeadOutput.SCORE], sample_ids=batch.sample_ids)
        scores: list[float] = outputs.columns[HeadOutput.SCORE].tolist()
        return scores

    def close(self) -> None:
        """Free every rank."""
        self._group.close()


def build_reward_model(
    model: RoleConfig | None,
    *,
    max_tokens: int,
    runtime: GroupFactory,
    tokenizer: PreTrainedTokenizerBase,
) -> EngineRewardModel | None:
    """Build the reward model of `reward.model`; return None if there is none.

    Args:
        model: Configuration of the model.
        max_tokens: Maximum number of tokens per micro-batch.
        runtime: Starts the workers.
        tokenizer: Tokenizer of the policy.

    Raises:
        ConfigError: If its tokenizer differs from the policy's, because it scores the token ids
            that the policy sampled.
    """
    if model is None:
        return None
    path = model.engine.model.path
    assert path is not None
    if not any(
        (Path(path) / file).exists() for file in ("tokenizer.json", "tokenizer_config.json")
    ):
        raise ConfigError(
            f"reward.model.engine.model.path {path} has no tokenizer, so its tokens cannot be "
            "compared with the policy's: copy the tokenizer's files there."
        )
    difference = describe_token_difference(tokenizer, AutoTokenizer.from_pretrained(path))
    if difference:
        raise ConfigError(
            f"the reward model in {path} has another tokenizer than the policy: {difference}. Use "
            "one that was trained with the policy's tokenizer (data.tokenizer.path), or write a "
            "reward function that decodes completions and calls the model."
        )
    group = runtime.open_group(
        REWARD_MODEL_ROLE,
        engine=replace(model.engine, optimizer=None),
        num_workers=model.num_workers,
    )
    try:
        group.init()
    # The caller does not have the group yet and cannot close it, so close it here.
    except BaseException:
        group.close()
        raise
    return EngineRewardModel(group, max_tokens=max_tokens)
