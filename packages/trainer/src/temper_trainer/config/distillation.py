"""On-policy distillation: the teachers, and what of them is learned on the policy's own completions."""

from dataclasses import dataclass
from typing import Literal

from temper_engine_api.errors import ConfigError
from temper_engine_api.specs import EngineConfig
from temper_trainer.config.ranges import check_range


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherConfig:
    """One frozen teacher, alone on its own resource pool; there is no colocated mode."""

    backend: Literal["engine", "vllm"] = "engine"
    """engine: any Temper engine; vllm: a server."""
    engine: EngineConfig
    """Model, precision and layout; the optimiser is never built, and nothing is offloaded between steps."""
    num_replicas: int = 1
    """Copies behind the load balancer."""
    num_workers: int = 1
    """Processes of each replica; more than 1 needs the ray runtime. Of backend vllm: GPUs, or CPU processes, that share one server."""
    devices: tuple[str, ...] = ()
    """runtime inline and backend vllm only: CUDA_VISIBLE_DEVICES of each replica in order; empty gives every server the driver's own."""
    pool: str = "teacher"
    """Resource pool of its own; that of the actor, critic, ref or rollout is refused."""
    route: str | None = None
    """The value of the routing key whose prompts it teaches; None takes the teacher's own name."""
    weight: float = 1.0
    """Factor of its loss or reward."""

    def __post_init__(self) -> None:
        check_range("num_replicas", self.num_replicas, at_least=1)
        check_range("num_workers", self.num_workers, at_least=1)
        check_range("weight", self.weight, at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationConfig:
    """What the policy learns from the teachers' log-probs at its own tokens."""

    objective: Literal["forward_kl", "reverse_kl", "jensen_shannon"] = "reverse_kl"
    """forward_kl: KL(teacher, policy) over the teacher's top_k tokens; reverse_kl: KL(policy, teacher) from the sampled tokens;
    jensen_shannon: both against their mixture, over the teacher's top_k tokens."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k2"
    """reverse_kl only: Schulman's. k1 has no useful gradient and is refused as a loss; as a reward it is the plain choice."""
    apply_as: Literal["loss", "reward"] = "loss"
    """loss: a term of the objective; reward: a reward of each token, less is better. Only reverse_kl can be a reward."""
    top_k: int = 64
    """forward_kl and jensen_shannon: tokens that a teacher names at each position."""
    tail: bool = True
    """forward_kl and jensen_shannon: count what is outside the top_k as one further token; False leaves it out."""
    mixture: float = 0.5
    """jensen_shannon only: weight of the teacher in the mixture."""
    coef: float = 1.0
    """Weight of the distillation's loss or reward beside the policy's."""
    clamp: float | None = None
    """Each token's loss or reward is clamped to [-clamp, clamp]; None leaves it."""
    timeout_s: float = 600.0
    """Longest wait for a teacher."""
    tokenizer_mismatch: Literal["refuse", "map"] = "refuse"
    """A teacher whose tokenizer differs: refuse the run, or map ids by the tokens' text where every token of a completion has one."""

    def __post_init__(self) -> None:
        check_range("distillation.top_k", self.top_k, at_least=1)
        check_range("distillation.mixture", self.mixture, above=0)
        check_range("distillation.coef", self.coef, above=0)
        check_range("distillation.clamp", self.clamp, above=0)
        check_range("distillation.timeout_s", self.timeout_s, above=0)
        if self.mixture >= 1:
            raise ConfigError(
                f"distillation.mixture is {self.mixture}, but must be above 0 and below 1."
            )
        if self.apply_as == "reward" and self.objective != "reverse_kl":
            raise ConfigError(
                f"distillation.apply_as is reward, but distillation.objective is {self.objective}, which is no reward of the sampled "
                "token: use reverse_kl, or apply_as=loss."
            )
        if self.apply_as == "loss" and self.objective == "reverse_kl" and self.kl_estimator == "k1":
            raise ConfigError(
                "distillation.kl_estimator k1 as a loss has zero expected gradient: use k2 or k3, or apply_as=reward."
            )

    @property
    def needs_top_k(self) -> bool:
        """Whether teachers are asked for their likeliest tokens, not only for the sampled ones."""
        return self.objective != "reverse_kl"
