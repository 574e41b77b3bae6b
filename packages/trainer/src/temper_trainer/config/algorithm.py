"""Settings of the RL algorithm and of its batches."""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from temper_engine_api.errors import ConfigError
from temper_trainer.config.import_path import is_import_path
from temper_trainer.config.ranges import check_range


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCorrectionConfig:
    """Weights w = p_old / p_rollout of tokens or whole completions; what is left out keeps its place in the denominators."""

    level: Literal["token", "sequence", "none"] = "token"
    """token: each token's own ratio; sequence: the product over a completion, on all its tokens; none: every weight is 1."""
    truncate_at: float | None = 2.0
    """Weights above this are lowered to it; None leaves them."""
    mask_low: float | None = None
    """Tokens (at level sequence, completions) with a ratio below this are left out; None leaves none out."""
    mask_high: float | None = None
    """Tokens (at level sequence, completions) with a ratio above this are left out; None leaves none out."""
    self_normalize: bool = False
    """Divide the weights by their mean over the step's trained tokens."""
    reject_kl: float | None = None
    """Completions whose mean KL(sampler, trainer) by token is above this, in nats, are left out; None leaves none out."""
    reject_kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's; only with reject_kl."""
    proximal: Literal["old", "rollout"] = "old"
    """What the objective's ratio is taken to: old measures log-probs before the update; rollout takes the sampler's, and then the ratio is
    the correction."""

    def __post_init__(self) -> None:
        name = "algorithm.rollout_correction"
        check_range(f"{name}.truncate_at", self.truncate_at, above=0)
        check_range(f"{name}.mask_low", self.mask_low, above=0)
        check_range(f"{name}.mask_high", self.mask_high, above=0)
        check_range(f"{name}.reject_kl", self.reject_kl, above=0)
        bounds = (self.mask_low, self.mask_high)
        if (
            self.mask_low is not None
            and self.mask_high is not None
            and self.mask_low >= self.mask_high
        ):
            raise ConfigError(
                f"{name}.mask_low is {self.mask_low} and mask_high is {self.mask_high}: the first must be below the second."
            )
        if self.level == "none" and (
            bounds != (None, None) or self.self_normalize or self.truncate_at not in (None, 2.0)
        ):
            raise ConfigError(
                f"{name}: truncate_at, mask_low, mask_high and self_normalize have no effect at level none: remove them."
            )
        if self.level == "none" and self.reject_kl is None and self.proximal == "old":
            raise ConfigError(
                f"{name}.level is none and reject_kl is not set, so nothing is corrected: set one, or remove the block."
            )
        if self.reject_kl is None and self.reject_kl_estimator != "k3":
            raise ConfigError(
                f"{name}.reject_kl_estimator has no effect without {name}.reject_kl: remove it, or set reject_kl."
            )
        if self.proximal == "rollout" and self.level != "none":
            raise ConfigError(
                f"{name}.proximal is rollout, where the objective's own ratio is the correction, and level is {self.level}, which would "
                "correct a second time: set level=none, or proximal=old."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicSamplingConfig:
    """Groups whose completions all have the same reward teach nothing: they are passed over, whole, and further prompts are drawn."""

    max_rounds: int = 10
    """Rounds of sampling of one step."""
    prompts_per_round: int | None = None
    """Prompts of each round; None takes batching.prompts_per_step."""
    on: Literal["score", "reward"] = "score"
    """What must differ within a group: the reward function's score, or the reward after shaping."""
    shortage: Literal["error", "train"] = "error"
    """After max_rounds with too few groups: stop the run, or train on those there are (at least one is needed)."""

    def __post_init__(self) -> None:
        check_range("algorithm.dynamic_sampling.max_rounds", self.max_rounds, at_least=1)
        check_range(
            "algorithm.dynamic_sampling.prompts_per_round", self.prompts_per_round, at_least=1
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReweightConfig:
    """A step's completions drawn again, with replacement, as many as there were."""

    method: Literal["power", "max_min", "max_random"] = "power"
    """power: by |reward| ** exponent; max_min: the best and the worst of each group; max_random: the best and one at random."""
    exponent: float = 2.0
    """Only for power."""

    def __post_init__(self) -> None:
        check_range("algorithm.reweight.exponent", self.exponent, at_least=0)


AdvantageName = Literal[
    "gae",
    "grpo",
    "dr_grpo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "opo",
    "gpg",
    "gdpo",
]


PolicyLossName = Literal["ppo", "gspo", "cispo", "gmpo", "clip_cov", "kl_cov", "sapo"]


AggregationName = Literal[
    "token_mean",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "sequence_mean_token_sum_norm",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    """One RL algorithm."""

    advantage: str = "grpo"
    """Estimator: a name of docs/algorithms.md (gae needs a critic), or an import path ``package.module:function`` of your own."""
    advantage_arguments: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)
    """Keyword arguments of your own estimator."""
    group_size: int = 8
    """Completions of one prompt."""
    policy_loss: str = "ppo"
    """The policy's objective: a name of docs/algorithms.md, or an import path ``package.module:Class`` of your own."""
    policy_loss_arguments: Mapping[str, str | int | float | bool | None] = field(
        default_factory=dict
    )
    """Fields of your own objective."""
    clip_low: float = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: float | None = None
    """Bound, above 1, on the loss of negative advantages; None is off. Only for ppo."""
    cov_fraction: float = 2e-4
    """Share of a mini-batch's trained tokens that clip_cov cuts out of the gradient, or that kl_cov holds back."""
    cov_low: float = 1.0
    """Only for clip_cov: tokens are drawn from those whose covariance of log-prob and advantage is above this, ..."""
    cov_high: float = 5.0
    """... and below this."""
    kl_cov_coef: float = 1.0
    """Only for kl_cov: weight of |log ratio| on the tokens of highest covariance."""
    sapo_positive_temperature: float = 1.0
    """Only for sapo: steepness of the soft gate where the advantage is positive."""
    sapo_negative_temperature: float = 1.05
    """Only for sapo: steepness of the soft gate where the advantage is negative; the larger, the faster such tokens fade."""
    aggregation: AggregationName = "token_mean"
    """How per-token losses become one number."""
    horizon: int | None = None
    """Tokens; only for sequence_mean_token_sum_norm."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus in the loss; with entropy_target, the weight that the controller begins with."""
    entropy_target: float | None = None
    """Entropy in nats below which a controller raises entropy_coef step by step, and above which it lowers it; None keeps it fixed."""
    entropy_coef_step: float = 0.001
    """By how much the controller moves entropy_coef after each step; only with entropy_target."""
    kl_loss_coef: float = 0.0
    """Weight of KL(policy, reference) in the loss; above 0 needs a reference, see kl_reference."""
    kl_reward_coef: float = 0.0
    """Weight of KL(policy, reference) taken from the reward; above 0 needs a reference, see kl_reference."""
    kl_reference: Literal["ref", "disabled_adapter"] = "ref"
    """The reference policy: the ref role, or the actor with its adapter disabled, which needs no second model."""
    kl_target: float | None = None
    """KL of a completion, in nats, that an adaptive controller steers kl_reward_coef to; None keeps the coefficient fixed."""
    kl_horizon: int = 10_000
    """Completions over which the adaptive controller acts; only with kl_target."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's; k1 has no useful gradient and is refused in the loss."""
    gamma: float = 1.0
    """Discount."""
    gae_lambda: float = 1.0
    """Decay of generalised advantage estimation; only for gae."""
    whiten_advantages: bool = False
    """Shift and scale advantages over the trained tokens of the step to mean 0 and deviation 1; reinforce_plus_plus always does."""
    value_clip: float | None = None
    """Range around the old value within which the value loss follows; only for gae."""
    dynamic_sampling: DynamicSamplingConfig | None = None
    """Samples on until a step has prompts_per_step groups that can teach; None trains on whatever was drawn."""
    rollout_correction: RolloutCorrectionConfig | None = None
    """Weighs tokens by how far the trainer's log-probs are from the sampler's; None only reports the difference."""
    reweight: ReweightConfig | None = None
    """PF-PPO: draws the step's samples anew by their rewards; None trains on each once."""

    def __post_init__(self) -> None:
        self._check_ranges()
        _check_name(
            "advantage",
            self.advantage,
            known=get_args(AdvantageName),
            arguments=self.advantage_arguments,
        )
        _check_name(
            "policy_loss",
            self.policy_loss,
            known=get_args(PolicyLossName),
            arguments=self.policy_loss_arguments,
        )
        self._check_advantage()
        self._check_policy_loss()
        self._check_kl()
        if (self.aggregation == "sequence_mean_token_sum_norm") != (self.horizon is not None):
            raise ConfigError(
                f"algorithm.horizon is {self.horizon} with algorithm.aggregation {self.aggregation}: sequence_mean_token_sum_norm divides "
                "by it and needs it (the longest completion in tokens), the others take none."
            )

    def _check_ranges(self) -> None:
        check_range("algorithm.group_size", self.group_size, at_least=1)
        check_range("algorithm.clip_low", self.clip_low, at_least=0)
        check_range("algorithm.clip_high", self.clip_high, at_least=0)
        check_range("algorithm.dual_clip", self.dual_clip, above=1)
        check_range("algorithm.horizon", self.horizon, at_least=1)
        check_range("algorithm.cov_fraction", self.cov_fraction, above=0, at_most=1)
        check_range("algorithm.cov_low", self.cov_low)
        check_range("algorithm.cov_high", self.cov_high)
        check_range("algorithm.kl_cov_coef", self.kl_cov_coef, above=0)
        check_range("algorithm.sapo_positive_temperature", self.sapo_positive_temperature, above=0)
        check_range("algorithm.sapo_negative_temperature", self.sapo_negative_temperature, above=0)
        check_range("algorithm.entropy_coef", self.entropy_coef)
        check_range("algorithm.entropy_target", self.entropy_target, above=0)
        check_range("algorithm.entropy_coef_step", self.entropy_coef_step, above=0)
        check_range("algorithm.kl_loss_coef", self.kl_loss_coef, at_least=0)
        check_range("algorithm.kl_reward_coef", self.kl_reward_coef, at_least=0)
        check_range("algorithm.kl_horizon", self.kl_horizon, at_least=1)
        check_range("algorithm.gamma", self.gamma, at_least=0, at_most=1)
        check_range("algorithm.gae_lambda", self.gae_lambda, at_least=0, at_most=1)
        check_range("algorithm.value_clip", self.value_clip, above=0)

    def _check_advantage(self) -> None:
        is_by_group = self.advantage not in (
            "gae",
            "reinforce_plus_plus",
            "remax",
        ) and not is_import_path(self.advantage)
        if is_by_group and self.group_size < 2:
            raise ConfigError(
                f"algorithm.advantage {self.advantage} compares completions of one prompt, but algorithm.group_size is "
                f"{self.group_size}: raise it to 2 or more, or use gae, reinforce_plus_plus or remax."
            )
        if self.advantage != "gae" and (self.gae_lambda != 1.0 or self.value_clip is not None):
            raise ConfigError(
                f"algorithm.gae_lambda and algorithm.value_clip have no effect with algorithm.advantage {self.advantage}: "
                "remove them, or use gae."
            )
        if self.advantage not in ("gae", "reinforce_plus_plus") and self.gamma != 1.0:
            raise ConfigError(
                f"algorithm.gamma has no effect with algorithm.advantage {self.advantage}, which weighs whole completions: remove it, or "
                "use gae or reinforce_plus_plus."
            )
        if self.advantage.startswith("reinforce_plus_plus") and self.whiten_advantages:
            raise ConfigError(
                f"algorithm.whiten_advantages has no effect with algorithm.advantage {self.advantage}, which always whitens: remove it."
            )

    def _check_policy_loss(self) -> None:
        if self.dual_clip is not None and self.policy_loss != "ppo":
            raise ConfigError(
                f"algorithm.dual_clip is {self.dual_clip}, but has no effect with algorithm.policy_loss {self.policy_loss}: remove it, or "
                "use ppo."
            )
        if self.cov_low >= self.cov_high:
            raise ConfigError(
                f"algorithm.cov_low is {self.cov_low} and algorithm.cov_high is {self.cov_high}: the first must be below the second."
            )
        if self.entropy_target is None and self.entropy_coef_step != 0.001:
            raise ConfigError(
                "algorithm.entropy_coef_step has no effect without algorithm.entropy_target: remove it, or set a target."
            )
        if self.entropy_target is not None and self.entropy_coef < 0:
            raise ConfigError(
                f"algorithm.entropy_coef is {self.entropy_coef}, but with algorithm.entropy_target it is a controller's first weight: "
                "set it to 0 or more."
            )

    def _check_kl(self) -> None:
        if self.kl_loss_coef > 0 and self.kl_estimator == "k1":
            raise ConfigError(
                "algorithm.kl_estimator k1 in the loss has zero expected gradient: use k2 or k3."
            )
        if self.kl_target is not None and (
            self.kl_reward_coef == 0 or not 0 < self.kl_target < math.inf
        ):
            raise ConfigError(
                f"algorithm.kl_target is {self.kl_target} and algorithm.kl_reward_coef is {self.kl_reward_coef}: the target must be above "
                "0, and steers a coefficient that must begin above 0."
            )
        if self.kl_target is None and self.kl_horizon != 10_000:
            raise ConfigError(
                "algorithm.kl_horizon has no effect without algorithm.kl_target: remove it, or set a target."
            )


def _check_name(
    field_name: str, name: str, *, known: tuple[str, ...], arguments: Mapping[str, object]
) -> None:
    key = f"algorithm.{field_name}"
    if is_import_path(name):
        return
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"{key} is {name!r}, which is none of {', '.join(known)}: {hint}Your own goes by import path, package.module:name."
        )
    if arguments:
        raise ConfigError(
            f"{key}_arguments are set, but {name} takes none of its own: remove them, or name your own by import path."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingConfig:
    """Sizes, in prompts, sequences and tokens; ragged sizes are handled by weights, nothing must divide."""

    prompts_per_step: int = 64
    """Prompts of one RL step; for SFT, demonstrations of one update."""
    num_mini_batches: int = 1
    """Updates that one pass over a step's samples makes."""
    num_passes: int = 1
    """Passes over a step's samples; above 1, old log-probs differ from the policy's."""
    max_tokens: int = 16384
    """Cap of a micro-batch."""
    tokens_per_update: int | None = None
    """task sft: an update takes demonstrations in order until the next one would exceed this; None takes prompts_per_step of them."""

    def __post_init__(self) -> None:
        if min(self.prompts_per_step, self.num_mini_batches, self.num_passes, self.max_tokens) < 1:
            raise ConfigError(f"batching: every size must be at least 1, but they are {self}.")
        check_range("batching.tokens_per_update", self.tokens_per_update, at_least=1)
        if self.num_mini_batches > self.prompts_per_step:
            raise ConfigError(
                f"batching.num_mini_batches is {self.num_mini_batches}, but batching.prompts_per_step is {self.prompts_per_step}, and "
                "completions of one prompt are never split over mini-batches: lower the first or raise the second."
            )
