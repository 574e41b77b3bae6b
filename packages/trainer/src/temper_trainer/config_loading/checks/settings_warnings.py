"""Log a warning for settings that a run accepts, but with which it learns nothing or little."""

import logging
from pathlib import Path

from temper_engine_api.specs import OptimizerSpec, ScheduleSpec
from temper_trainer.config.algorithm import AlgorithmConfig
from temper_trainer.config.data import FileSource
from temper_trainer.config.environment import BUILT_IN_ENVIRONMENTS, load_environment_class
from temper_trainer.config.run import INFERENCE_TASKS
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.config_loading.checks.data_files import (
    count_training_rows,
    is_remote,
    read_first_rows,
)
from temper_trainer.reward.judge_endpoint import warn_if_unreachable
from temper_trainer.reward.registry import find_rewards, iterate_selected_rewards
from temper_trainer.settings.variants import Custom

logger = logging.getLogger(__name__)

MAX_ADAM_RATE = 0.1
"""Rate of Adam at which an update changes a weight by more than the size of most weights."""
MAX_OTHER_RATE = 100.0
"""The same for other optimizers, whose updates shrink with the gradient."""


def warn_about_aggregation(config: AlgorithmConfig) -> None:
    """Log a warning if the policy loss was published with another aggregation."""
    loss = config.policy_loss
    published = None if isinstance(loss, Custom) else loss.published_aggregation
    if published is not None and config.aggregation != published:
        logger.warning(
            "algorithm.policy_loss %s was published with algorithm.aggregation %s, but the run "
            "uses %s: completions of different length then have other weights than in the paper.",
            loss.name,
            published,
            config.aggregation,
        )


def warn_about_judges(config: TrainerConfig) -> None:
    """Log a warning for each judge whose endpoint cannot be reached or does not know its model."""
    if not config.generates_completions:
        return
    for name in find_rewards(config.reward, iterate_selected_rewards(config.data, config.reward)):
        if name in config.reward.judges:
            warn_if_unreachable(config.reward.judges[name], name=name)


def warn_about_remote_files(config: TrainerConfig) -> None:
    """Log a warning for each data file on a remote host, which only a run reads."""
    for name, source in config.sources.items():
        for path in source.paths if isinstance(source, FileSource) else ():
            if is_remote(path):
                logger.warning(
                    "%s.paths names %s, which --check does not read: the run fails at its start if "
                    "it cannot be read, or if a row is wrong",
                    name,
                    path,
                )


def warn_about_settings(config: TrainerConfig) -> None:
    """Log a warning for models that do not learn, and for agents that may end the run."""
    _warn_about_empty_answers(config)
    if config.task in INFERENCE_TASKS:
        return
    if config.task == "rl" and not config.algorithm.has_equal_token_advantages:
        _warn_about_branches(config)
    _warn_about_data(config)
    num_updates = config.run.total_steps
    if config.task == "rl":
        num_updates *= config.batching.num_mini_batches * config.batching.num_passes
    # The number of steps of whole epochs is known once the data is read.
    run_length = None if config.run.total_epochs else (config.run.total_steps, num_updates)
    for name, role in config.trained_roles.items():
        if role.engine.optimizer is not None:
            _warn_about_rate(f"{name}.engine", role.engine.optimizer)
            _warn_about_schedule(f"{name}.engine", role.engine.schedule, run_length=run_length)
    if (warm_start := config.warm_start) is not None:
        _warn_about_rate("warm_start", warm_start.optimizer)
        length = (warm_start.total_steps, warm_start.total_steps)
        _warn_about_schedule("warm_start", warm_start.schedule, run_length=length)


def _warn_about_rate(key: str, optimizer: OptimizerSpec) -> None:
    """Log a warning for a rate that changes no weight, or whose first update replaces them."""
    if optimizer.lr == 0:
        logger.warning(
            "%s.optimizer.lr is 0, so its weights will not change: set it above 0, or use "
            "task=eval to measure the model",
            key,
        )
        return
    if optimizer.lr * optimizer.weight_decay >= 1:
        logger.warning(
            "%s.optimizer: weight decay multiplies weights by 1 - lr * weight_decay = 1 - %g * %g "
            "in every update, which removes them: lower one of the two",
            key,
            optimizer.lr,
            optimizer.weight_decay,
        )
    # Adam changes every weight by about lr, whatever the size of the gradient. Rates of other
    # optimizers depend on the gradient, but clipping bounds the norm of an update by lr.
    is_adam = "adam" in optimizer.name.rpartition(".")[2].lower()
    if optimizer.lr >= (MAX_ADAM_RATE if is_adam else MAX_OTHER_RATE):
        logger.warning(
            "%s.optimizer.lr is %g, with which the first updates of %s replace the model's "
            "weights, most of which are below 0.1: use a rate such as 1e-6 in RL, or 1e-5 in SFT",
            key,
            optimizer.lr,
            optimizer.name,
        )


def _warn_about_schedule(
    key: str, schedule: ScheduleSpec, *, run_length: tuple[int, int] | None
) -> None:
    """Log a warning for a warmup that does not end, and for updates with a rate of 0.

    `run_length` is the number of steps and of updates of the run; None if it is not known.
    """
    if run_length is None:
        return
    unit = "updates" if schedule.advance == "update" else "RL steps"
    length = run_length[schedule.advance == "update"]
    if schedule.num_warmup_steps > length:
        logger.warning(
            "%s.schedule has %d warmup steps, but the run has %d %s, so the rate never reaches "
            "optimizer.lr: lower schedule.warmup_steps, or train for longer",
            key,
            schedule.num_warmup_steps,
            length,
            unit,
        )
    # With kind=constant total_steps is only the base of warmup_ratio.
    decays_to_0 = schedule.kind != "constant" and schedule.min_lr_ratio == 0
    if schedule.total_steps and schedule.total_steps < length and decays_to_0:
        logger.warning(
            "%s.schedule.total_steps is %d, but the run has %d %s, and the rate of the others is "
            "0: set total_steps to 0, which means the length of the run, or set min_lr_ratio",
            key,
            schedule.total_steps,
            length,
            unit,
        )


def _warn_about_data(config: TrainerConfig) -> None:
    """Log a warning for steps that repeat prompts, and for evaluations on training data."""
    size, num_rows = config.batching.prompts_per_step, count_training_rows(config)
    if num_rows is not None and num_rows < size:
        logger.warning(
            "batching.prompts_per_step is %d, but the training data has %d rows, so every step "
            "has rows several times: lower it, or add rows",
            size,
            num_rows,
        )
    trained = {
        str(Path(path).resolve()): key
        for key, source in config.data.train_sources.items()
        if isinstance(source, FileSource)
        for path in source.paths
    }
    for key, source in config.data.eval_sources.items():
        for path in source.paths if isinstance(source, FileSource) else ():
            if (train_key := trained.get(str(Path(path).resolve()))) is not None:
                logger.warning(
                    "%s reads %s, which %s trains on, so evaluations measure how well the model "
                    "remembers it: hold rows back in a file of their own",
                    key,
                    path,
                    train_key,
                )


def _warn_about_empty_answers(config: TrainerConfig) -> None:
    """Log a warning for each source without any answer, if the task reads answers."""
    if config.task not in ("rl", "sft", "eval"):  # dpo and rm refuse them, the others read none
        return
    effect = (
        "the model learns to end at once"
        if config.task == "sft"
        else "rewards have nothing to compare with (ignore this if yours reads no answer)"
    )
    for key, source in config.data.sources.items():
        # A conversation has no field with an answer.
        if not isinstance(source, FileSource) or source.messages_key is not None:
            continue
        rows = read_first_rows(source, kind=None).rows
        if rows and not any(row.answer.strip() for row in rows):
            logger.warning(
                "%s: field %r is empty in all of the first %d rows, so %s: correct the rows, or "
                "set %s.answer_key to the field with the answers",
                key,
                source.answer_key,
                len(rows),
                effect,
                key,
            )


def _warn_about_branches(config: TrainerConfig) -> None:
    """Log a warning for each environment whose rollouts may be several samples."""
    for key, environment in config.all_environments.items():
        # One completion is one sample, whatever the agent does.
        if environment.max_turns == 1 or environment.name in BUILT_IN_ENVIRONMENTS:
            continue
        if not hasattr(load_environment_class(environment), "run_agent"):
            continue
        logger.warning(
            "%s is %s, whose rollouts are several samples if the agent changes what the policy "
            "had read before: the run then stops, because the tokens of a rollout have different "
            "advantages. Set algorithm.advantage to an estimator such as grpo, "
            "algorithm.kl_reward_coef=0 and algorithm.reweight=null, or let the agent only append "
            "to its conversation",
            key,
            environment.name,
        )
