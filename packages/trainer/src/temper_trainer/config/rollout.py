"""How completions are sampled."""

from dataclasses import dataclass, field
from typing import Literal

from temper_engine_api.errors import ConfigError
from temper_trainer.config.ranges import check_range
from temper_trainer.config.vllm import VllmConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """Of every completion; evaluation has its own. How many a prompt gets is algorithm.group_size, each with a seed of its own."""

    temperature: float = 1.0
    """Divides logits; 0 is greedy. Training needs it above 0, and the engine divides by the same."""
    top_p: float = 1.0
    """Smallest set of tokens whose probability reaches this is kept."""
    top_k: int = 0
    """Only the most likely k are kept; 0 keeps all."""
    max_tokens: int = 512
    """Longest completion, end token included."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion, besides the end token; the text stays in the completion's tokens."""

    def __post_init__(self) -> None:
        check_range("temperature", self.temperature, at_least=0)
        check_range("top_p", self.top_p, above=0, at_most=1)
        check_range("top_k", self.top_k, at_least=0)
        check_range("max_tokens", self.max_tokens, at_least=1)
        if "" in self.stop:
            raise ConfigError(
                f"stop is {list(self.stop)}, but an empty text would end every completion at once: take it out."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """The sampler of a training run."""

    sampler: Literal["hf", "vllm"] = "hf"
    """hf: continuous batching on transformers, runs anywhere; vllm: servers in processes of their own."""
    num_replicas: int = 1
    """Servers among which requests are shared; more than 1 needs sampler vllm."""
    max_concurrent: int = 256
    """Sequences that one replica decodes together."""
    dtype: Literal["bf16", "fp32"] = "fp32"
    """Of the sampler's weights."""
    pool: str = "train"
    """ray only: resource pool of the sampler; the roles' own pool colocates it with them."""
    canary: bool = True
    """After each weight sync, compare a prompt's log-probs in engine and sampler."""
    canary_tolerance: float = 0.05
    """Largest difference of a log-prob that the canary accepts; bf16 on both sides needs about 0.2."""
    vllm: VllmConfig = field(default_factory=VllmConfig)
    """sampler vllm only."""

    def __post_init__(self) -> None:
        check_range("rollout.num_replicas", self.num_replicas, at_least=1)
        check_range("rollout.max_concurrent", self.max_concurrent, at_least=1)
        if self.sampler == "hf" and self.num_replicas > 1:
            raise ConfigError(
                f"rollout.num_replicas is {self.num_replicas}, but rollout.sampler hf is one process: use rollout=vllm."
            )
        check_range("rollout.canary_tolerance", self.canary_tolerance, above=0)
