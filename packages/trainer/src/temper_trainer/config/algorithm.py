"""Settings of the RL algorithm and of the batches that it trains on."""

from dataclasses import field
from typing import Literal

from temper_engine_api.errors import ConfigError
from temper_trainer.algorithms.advantages.estimators.estimator import AdvantageEstimator
from temper_trainer.algorithms.advantages.estimators.group_estimators import Grpo
from temper_trainer.algorithms.policy_losses.clipped_losses import Ppo
from temper_trainer.algorithms.policy_losses.policy_loss import PolicyLoss
from temper_trainer.algorithms.resampling import Reweighting
from temper_trainer.config.rollout_correction import RolloutCorrection
from temper_trainer.settings.ranges import FiniteFloat, NonNegativeFloat, PositiveFloat, PositiveInt
from temper_trainer.settings.variants import Custom, list_variants, settings


@settings
class EntropyControllerConfig:
    """A controller that raises entropy_coef after each step below the target, and lowers it above.

    The bonus is applied only after a step at or below the target (arXiv:2505.22312).
    """

    target: PositiveFloat
    """Entropy to keep, in nats."""
    coef_step: PositiveFloat = 0.001
    """Change of entropy_coef per step."""
    coef_max: PositiveFloat = 1.0
    """Upper bound on entropy_coef."""


@settings
class KlControllerConfig:
    """A controller that steers the KL in the reward to a target, by scaling kl_reward_coef.

    See arXiv:1909.08593.
    """

    target: PositiveFloat
    """KL per completion, in nats."""
    horizon_completions: PositiveInt = 10_000
    """Completions over which a lasting error of 20 % or more scales the weight by about e^0.2."""


@settings
class DynamicSamplingConfig:
    """DAPO's dynamic sampling: discard groups with equal rewards, and sample more prompts."""

    max_rounds: PositiveInt = 10
    """Maximum number of sampling rounds per step."""
    prompts_per_round: PositiveInt | None = None
    """Prompts per round; None takes batching.prompts_per_step."""
    on: Literal["score", "reward"] = "score"
    """Quantity that must differ within a group. score: the reward function's output; reward: the
    score after shaping.
    """
    shortage: Literal["error", "train"] = "error"
    """If max_rounds gave too few groups. error: stop the run; train: train on the groups there are
    (at least one).
    """


AggregationName = Literal[
    "token_mean",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "sequence_mean_token_sum_norm",
    "prompt_mean",
    "token_sum",
]


@settings
class AlgorithmConfig:
    """Settings of the RL algorithm: advantages, policy loss, KL, entropy and aggregation."""

    advantage: AdvantageEstimator | Custom = field(default_factory=Grpo)
    """Advantage estimator, from docs/algorithms.md (some, such as gae and vapo, need a critic), or
    a function of your own.
    """
    group_size: PositiveInt = 8
    """Number of completions that are sampled for each prompt."""
    policy_loss: PolicyLoss | Custom = field(default_factory=Ppo)
    """Loss per trained token: one from docs/algorithms.md or your own."""
    aggregation: AggregationName = "token_mean"
    """Reduction of the per-token losses to a scalar."""
    horizon: PositiveInt | None = None
    """sequence_mean_token_sum_norm only, which needs it: constant divisor in tokens, usually
    sampling.max_tokens.
    """
    entropy_coef: FiniteFloat = 0.0
    """Weight of the entropy bonus; with entropy_controller, its initial weight."""
    entropy_controller: EntropyControllerConfig | None = None
    """Adapt entropy_coef after each step. None keeps it fixed."""
    kl_loss_coef: NonNegativeFloat = 0.0
    """Weight of KL(policy, reference) in the loss. Above 0 needs a reference, see
    kl_reference.
    """
    kl_reward_coef: NonNegativeFloat = 0.0
    """Weight of KL(policy, reference) that is subtracted from the reward. Above 0 needs
    a reference, see kl_reference.
    """
    kl_reference: Literal["ref", "disabled_adapter"] = "ref"
    """Reference policy. ref: the ref role; disabled_adapter: the actor without its LoRA adapter,
    which needs no second model.
    """
    kl_controller: KlControllerConfig | None = None
    """Adapt kl_reward_coef after each step. None keeps it fixed."""
    kl_estimator: Literal["k1", "k2", "k3", "k1+", "k3+", "k3_ratio"] = "k3"
    """Estimator of the KL. k1, k2, k3: Schulman's; as a loss, k2 has the gradient of KL(policy,
    reference) and k3 that of KL(reference, policy); k1 has none and is rejected. The others are
    only for the loss. k1+, k3+: the value of k1 or k3 with the gradient of k2; k3_ratio: k3 times
    the ratio of the policy loss, exact in expectation also for tokens of an older policy.
    """
    kl_clamp: PositiveFloat | None = None
    """Bound on the k3 estimate of one token in nats; no gradient beyond it. Peers use 10. None is
    off. Only for estimators that contain k3.
    """
    whiten_advantages: bool = False
    """Normalize advantages to mean 0 and standard deviation 1 over the step's trained tokens;
    reinforce_plus_plus always does.
    """
    dynamic_sampling: DynamicSamplingConfig | None = None
    """Keep sampling until a step has prompts_per_step groups with different rewards. None trains on
    all sampled groups.
    """
    rollout_correction: RolloutCorrection | None = None
    """Correct for the difference between the trainer's and the sampler's log-probs. None only
    reports it.
    """
    overlong_filter: bool = False
    """Train no token of rollouts that reached the token limit, whose reward says little about them.
    They keep counting in the statistics of their group.
    """
    reweight: Reweighting | None = None
    """PF-PPO: resample a step's completions by their rewards. None trains on each once."""

    def __post_init__(self) -> None:
        # Ranges first, because the checks below compare values that must be valid.
        self._check_advantage()
        self._check_entropy()
        self._check_kl()
        # No default: the divisor scales the learning rate, and the right one depends on max_tokens.
        if (self.aggregation == "sequence_mean_token_sum_norm") != (self.horizon is not None):
            raise ConfigError(
                f"algorithm.horizon is {self.horizon} with algorithm.aggregation "
                f"{self.aggregation}: sequence_mean_token_sum_norm needs it as its divisor "
                "(usually sampling.max_tokens), and the others do not use it."
            )

    def reads(self, name: str) -> bool:
        """Return True if the estimator needs an optional field of ``StepRewards``."""
        return isinstance(self.advantage, AdvantageEstimator) and name in self.advantage.inputs

    @property
    def has_equal_token_advantages(self) -> bool:
        """True if all tokens of a rollout have the same advantage.

        An agent's rollout may then be several samples.
        """
        estimator = self.advantage
        return (
            isinstance(estimator, AdvantageEstimator)
            and not estimator.is_per_token
            and self.kl_reward_coef == 0
            and self.reweight is None
        )

    def _check_advantage(self) -> None:
        estimator = self.advantage
        if isinstance(estimator, Custom):
            return
        if estimator.compares_group and self.group_size < 2:
            others = [
                name
                for name, each in list_variants(AdvantageEstimator).items()  # type: ignore[type-abstract]
                if not each.compares_group
            ]
            raise ConfigError(
                f"algorithm.advantage {estimator.name} compares completions of one prompt, but "
                f"algorithm.group_size is {self.group_size}: raise it to 2 or more, or use "
                f"{', '.join(others[:-1])} or {others[-1]}."
            )

    def _check_entropy(self) -> None:
        controller = self.entropy_controller
        if controller is not None and not 0 <= self.entropy_coef <= controller.coef_max:
            raise ConfigError(
                f"algorithm.entropy_coef is {self.entropy_coef}, but the initial weight of "
                "algorithm.entropy_controller must be between 0 and its coef_max "
                f"{controller.coef_max}: change one of them."
            )

    def _check_kl(self) -> None:
        if self.kl_loss_coef > 0 and self.kl_estimator == "k1":
            raise ConfigError(
                "algorithm.kl_estimator k1 in the loss has zero expected gradient: use k2 or k3."
            )
        if self.kl_loss_coef == 0 and self.kl_estimator not in ("k1", "k2", "k3"):
            value = self.kl_estimator[:2]
            raise ConfigError(
                f"algorithm.kl_estimator {self.kl_estimator} changes the gradient of a KL in the "
                f"loss, but algorithm.kl_loss_coef is 0: use {value}, which has the same value in "
                "a reward, or set kl_loss_coef."
            )
        if self.kl_controller is not None and self.kl_reward_coef == 0:
            raise ConfigError(
                "algorithm.kl_controller is set and algorithm.kl_reward_coef is 0, which no factor "
                "changes: set kl_reward_coef above 0."
            )


def list_estimators_with_input(name: str) -> list[str]:
    """Return the names of the estimators that need an optional field of ``StepRewards``."""
    estimators = list_variants(AdvantageEstimator)  # type: ignore[type-abstract]
    return [key for key, estimator in estimators.items() if name in estimator.inputs]


@settings
class BatchingConfig:
    """Batch sizes in prompts, sequences and tokens; no size needs to divide another."""

    prompts_per_step: PositiveInt = 64
    """Prompts per RL step; for SFT, demonstrations per update."""
    num_mini_batches: PositiveInt = 1
    """Updates per pass over a step's samples."""
    num_passes: PositiveInt = 1
    """Passes over a step's samples (PPO epochs). Above 1, old log-probs differ from the policy's.
    """
    max_tokens: PositiveInt = 16384
    """Maximum number of tokens in a micro-batch."""
    tokens_per_update: PositiveInt | None = None
    """task sft only: fill each update with demonstrations, in order, up to this many tokens. None
    takes prompts_per_step demonstrations.
    """

    def __post_init__(self) -> None:
        # Group statistics need complete groups, so a mini-batch consists of prompts.
        if self.num_mini_batches > self.prompts_per_step:
            raise ConfigError(
                f"batching.num_mini_batches is {self.num_mini_batches}, but "
                f"batching.prompts_per_step is {self.prompts_per_step}, and completions of one "
                "prompt are never split across mini-batches: lower the first or raise the second."
            )
