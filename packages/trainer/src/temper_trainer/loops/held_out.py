"""Evaluate a supervised stage on held-out examples: its loss and metrics, without an update."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from temper_engine_api.objective import HeadOutput, HeadOutputs, Objective
from temper_engine_api.reduction import count_denominators, reduce_loss
from temper_trainer.algorithms.preference_losses.preference_loss import ReferenceSource
from temper_trainer.config.data import name_eval_set
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.data.prompts import encode_demonstrations, encode_preferences
from temper_trainer.loops.example_batches import TrainingExample, keep_fitting, prepare_samples
from temper_trainer.loops.rl_step import run_forward
from temper_trainer.loops.run.run_setup import RunData, report_dropped
from temper_trainer.metrics.evaluation_estimators import Z_95
from temper_trainer.metrics.evaluation_report import INTERVAL
from temper_trainer.metrics.run_log import RunLog
from temper_trainer.progress import track_progress
from temper_trainer.runtime.worker_group import WorkerGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutSet:
    """Held-out demonstrations, pairs or labeled completions."""

    name: str
    """Empty for ``data.eval``."""
    examples: Sequence[TrainingExample]


def encode_held_out(
    config: TrainerConfig, data: RunData, *, limit: tuple[int, str], log: RunLog
) -> list[HeldOutSet]:
    """Tokenize the held-out rows of task sft, dpo or rm as examples.

    Args:
        config: The configuration.
        data: Rows of all sources, and the tokenizer.
        limit: Maximum number of tokens per example, and the key that sets it.
        log: Log of the run.
    """
    sets, dropped = [], {}
    for key, source in config.data.eval_sources.items():
        # Encoded like the training data, but with its own keys, such as messages_key.
        own = replace(config.data, train=source)
        encoded: Sequence[TrainingExample]
        if config.preference_kind is None:
            encoded, num_dropped = encode_demonstrations(data.problems[key], data.tokenizer, own)
        else:
            encoded, num_dropped = encode_preferences(data.preferences[key], data.tokenizer, own)
        examples = keep_fitting(encoded, max_tokens=limit, config=config.data)
        name = name_eval_set(key)
        sets.append(HeldOutSet(name=name, examples=examples))
        dropped[f"eval/{name}" if name else "eval"] = num_dropped + len(encoded) - len(examples)
    report_dropped(log, config.data, phase=config.task, **dropped)
    return sets


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutEvaluator:
    """Evaluates the held-out sets of a stage between its steps."""

    sets: Sequence[HeldOutSet]
    """May be empty."""
    objective: Objective
    """Objective of the stage."""
    reference: ReferenceSource
    """Source of the reference log-probs that the objective reads."""
    batch_size: int
    """Examples per forward pass, between two ``check_stop`` calls."""
    max_tokens: int
    """Maximum number of tokens per micro-batch."""
    log: RunLog

    def evaluate(
        self,
        groups: Mapping[str, WorkerGroup],
        *,
        step: int,
        check_stop: Callable[[], object] = lambda: None,
    ) -> dict[str, float]:
        """Evaluate and log all sets; return their metrics; empty without sets.

        Args:
            groups: Workers for the actor, and for the reference policy if there is one.
            step: Number of completed steps.
            check_stop: Called between forward passes; may raise to abandon the evaluation.
        """
        logged: dict[str, float] = {}
        for each in self.sets:
            with track_progress("held-out evaluation"):
                metrics = self.measure(each.examples, groups=groups, check_stop=check_stop)
            self.log.print_line(
                f"step {step}, {each.name or 'held out'}: "
                f"{_describe(metrics, num_examples=len(each.examples))}"
            )
            prefix = f"eval/{each.name}" if each.name else "eval"
            logged |= {f"{prefix}/{name}": value for name, value in metrics.items()}
        if logged:
            # The lines above have the results.
            self.log.log_metrics(step, logged, phase="eval", prints_line=False)
        return logged

    def measure(
        self,
        examples: Sequence[TrainingExample],
        *,
        groups: Mapping[str, WorkerGroup],
        check_stop: Callable[[], object],
    ) -> dict[str, float]:
        """Return the metrics that the objective has on all examples as one mini-batch.

        The engines compute log-probs or scores in forward passes, and the objective is evaluated
        here. So the results do not depend on ranks and micro-batches.

        Returns:
            ``sft/loss`` or ``preference/loss``, and the objective's metrics. An accuracy also
            has half the width of its 95 % confidence interval over the examples.
        """
        samples, plan = prepare_samples(
            examples,
            objective=self.objective,
            reference=self.reference,
            groups=groups,
            max_tokens=self.max_tokens,
            # Only assigns the examples to forward passes.
            seed=0,
            num_parts=math.ceil(len(examples) / self.batch_size),
            before_part=check_stop,
        )
        samples = samples.with_columns(self.objective.prepare(samples, seed=0))
        # The entropy is a metric of updates, and would need another forward pass here.
        (output,) = self.objective.required_outputs - {HeadOutput.ENTROPY}
        column = run_forward(
            samples,
            plan,
            role="actor",
            group=groups["actor"],
            output=output,
            before_part=check_stop,
        )
        terms = self.objective(HeadOutputs(columns={output: column}), samples)
        loss = reduce_loss(
            terms,
            samples,
            denominators=count_denominators(samples),
            aggregation=self.objective.aggregation,
        )
        metrics = {name: metric.result for name, metric in terms.metrics.items()}
        kind = next(iter(metrics)).partition("/")[0]
        accuracy = metrics.get("preference/accuracy")
        if accuracy is not None and len(examples) > 1:
            # The sample variance, as in `estimate_mean`, as if no pair had equal rewards.
            variance = accuracy * (1.0 - accuracy) / (len(examples) - 1)
            metrics[f"preference/accuracy{INTERVAL}"] = Z_95 * math.sqrt(variance)
        return metrics | {f"{kind}/loss": float(loss)}


def _describe(metrics: Mapping[str, float], *, num_examples: int) -> str:
    """Return the results of a set as text."""
    parts = [f"{num_examples} examples"]
    for name, value in metrics.items():
        if not name.endswith(INTERVAL):
            interval = f" +- {metrics[ci]:.3f}" if (ci := name + INTERVAL) in metrics else ""
            parts.append(f"{name.partition('/')[2]} {value:.3f}{interval}")
    return ", ".join(parts)
