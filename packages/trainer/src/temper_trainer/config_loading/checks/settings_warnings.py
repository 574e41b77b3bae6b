"""Log a warning for settings that a run accepts, but with which it learns nothing or little."""

import logging

from temper_trainer.config.algorithm import AlgorithmConfig
from temper_trainer.config.environment import BUILT_IN_ENVIRONMENTS, load_environment_class
from temper_trainer.config.run import INFERENCE_TASKS
from temper_trainer.config.trainer_config import TrainerConfig
from temper_trainer.reward.judge_endpoint import warn_if_unreachable
from temper_trainer.reward.registry import find_rewards
from temper_trainer.reward.row_rewards import iterate_selected_rewards
from temper_trainer.settings.variants import Custom

logger = logging.getLogger(__name__)


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


def warn_about_settings(config: TrainerConfig) -> None:
    """Log a warning for models that do not learn, and for agents that may end the run."""
    if config.task in INFERENCE_TASKS:
        return
    if config.task == "rl" and not config.algorithm.has_equal_token_advantages:
        _warn_about_branches(config)
    for name, role in config.trained_roles.items():
        optimizer = role.engine.optimizer
        if optimizer is not None and optimizer.lr == 0:
            logger.warning(
                "%s.engine.optimizer.lr is 0, so its weights will not change: set it above 0, or "
                "use task=eval to measure the model",
                name,
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
