"""Make the samples of supervised stages, with the columns that their objectives read."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.objective import Objective
from temper_trainer.algorithms.preference_losses.preference_loss import ReferenceSource
from temper_trainer.batching.samples import (
    demonstrations_to_samples,
    labeled_to_samples,
    mismatch_completions,
    pairs_to_samples,
)
from temper_trainer.batching.step_plan import RoleLayout, StepPlan, plan_step
from temper_trainer.config.algorithm import BatchingConfig
from temper_trainer.config.data import DataConfig, describe_overlong_remedies
from temper_trainer.data.rows import DataError
from temper_trainer.loops.rl_step import run_forward
from temper_trainer.runtime.worker_group import WorkerGroup
from temper_trainer.types import KL_BASELINE, Demonstration, LabeledCompletion, Pair

TrainingExample = Demonstration | Pair | LabeledCompletion
Example = TypeVar("Example", bound=TrainingExample)


def count_tokens(example: TrainingExample) -> int:
    """Return the token count of an example with its prompts; a pair counts both completions."""
    return sum(len(each.prompt.tokens) + len(each.tokens) for each in list_demonstrations(example))


def list_demonstrations(example: TrainingExample) -> tuple[Demonstration, ...]:
    """Return the completions of an example with their prompts."""
    return (example,) if isinstance(example, Demonstration) else example.demonstrations


def keep_fitting(
    examples: Sequence[Example],
    *,
    max_tokens: tuple[int, str],
    config: DataConfig,
    must_keep: bool = True,
) -> list[Example]:
    """Return the examples that are short enough to train on.

    Args:
        examples: With their prompts. A pair is too long if one of its completions is.
        max_tokens: The limit, and the key that sets it.
        config: Settings of the data.
        must_keep: False if the result may be empty.

    Raises:
        DataError: Naming the row, if a longer one is an error; or if all are too long.
    """
    limit, key = max_tokens
    kept: list[Example] = []
    for example in examples:
        members = list_demonstrations(example)
        longest = max(members, key=lambda each: len(each.prompt.tokens) + len(each.tokens))
        length = len(longest.prompt.tokens) + len(longest.tokens)
        if length <= limit:
            kept.append(example)
        elif config.overlong_prompts == "error":
            raise DataError(
                f"{longest.prompt.location}: prompt and solution have {length} tokens, but "
                f"{key} is {limit}: {describe_overlong_remedies(config)}."
            )
    if must_keep and examples and not kept:
        raise DataError(
            f"all {len(examples)} prompts with their solutions are longer than {key}, which is "
            f"{limit}: raise it."
        )
    return kept


def prepare_samples(
    examples: Sequence[TrainingExample],
    *,
    objective: Objective,
    reference: ReferenceSource,
    groups: Mapping[str, WorkerGroup],
    max_tokens: int,
    seed: int,
    num_parts: int = 1,
    before_part: Callable[[], object] = lambda: None,
) -> tuple[SequenceBatch, StepPlan]:
    """Return the samples with the columns of the objective, and a plan for them.

    Args:
        examples: Examples of one type.
        objective: Objective of the stage.
        reference: Source of the reference log-probs that the objective reads.
        groups: Workers for the actor, and for the reference policy if there is one.
        max_tokens: Maximum number of tokens per micro-batch.
        seed: Seed of the plan.
        num_parts: Number of mini-batches in the plan; at most one per example.
        before_part: Called before each forward pass for a mini-batch.
    """
    samples = _make_samples(examples)
    # The run's `batching` does not apply: a stage makes one update per step, and with
    # ``tokens_per_update`` its number of examples varies.
    batching = BatchingConfig(
        prompts_per_step=len(examples), num_mini_batches=num_parts, max_tokens=max_tokens
    )
    layouts = {name: RoleLayout.from_topology(group.topology) for name, group in groups.items()}
    plan = plan_step(samples, batching, layouts=layouts, seed=seed)
    if reference != "none":
        ref_logprobs = _compute_reference(
            samples, plan, reference=reference, groups=groups, before_part=before_part
        )
        samples = samples.with_columns({"ref_logprobs": ref_logprobs})
    if KL_BASELINE in objective.columns:
        mismatched = demonstrations_to_samples(
            mismatch_completions(
                [each for example in examples for each in list_demonstrations(example)]
            )
        )
        plan_mismatched = plan_step(mismatched, batching, layouts=layouts, seed=seed)
        baseline = _estimate_kl(
            mismatched,
            plan_mismatched,
            reference=reference,
            groups=groups,
            before_part=before_part,
        )
        samples = samples.with_columns(
            {}, {KL_BASELINE: torch.full((samples.num_sequences,), baseline)}
        )
    return samples, plan


def _make_samples(examples: Sequence[TrainingExample]) -> SequenceBatch:
    # All examples of a stage have the same type.
    if pairs := [each for each in examples if isinstance(each, Pair)]:
        return pairs_to_samples(pairs)
    if labeled := [each for each in examples if isinstance(each, LabeledCompletion)]:
        return labeled_to_samples(labeled)
    return demonstrations_to_samples([each for each in examples if isinstance(each, Demonstration)])


def _compute_reference(
    samples: SequenceBatch,
    plan: StepPlan,
    *,
    reference: ReferenceSource,
    groups: Mapping[str, WorkerGroup],
    before_part: Callable[[], object],
) -> Tensor:
    """Return [T] log-probs of the reference policy."""
    role = "ref" if reference == "ref" else "actor"
    return run_forward(
        samples,
        plan,
        role=role,
        group=groups[role],
        without_adapter=role == "actor",
        before_part=before_part,
    )


def _estimate_kl(
    mismatched: SequenceBatch,
    plan: StepPlan,
    *,
    reference: ReferenceSource,
    groups: Mapping[str, WorkerGroup],
    before_part: Callable[[], object],
) -> float:
    """Return max(0, mean over sequences of sum log(p / ref)), before the update."""
    policy = run_forward(
        mismatched, plan, role="actor", group=groups["actor"], before_part=before_part
    )
    ref_logprobs = _compute_reference(
        mismatched, plan, reference=reference, groups=groups, before_part=before_part
    )
    log_ratio = torch.where(mismatched.loss_mask, policy - ref_logprobs, 0.0)
    return max(0.0, float(log_ratio.sum()) / mismatched.num_sequences)
