"""A base class for environments that exchange text; tokens are decoded and encoded here."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from temper_trainer.config.environment import EnvironmentConfig
from temper_trainer.environment.protocol import Observation
from temper_trainer.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class TextObservation:
    """An environment's response to one completion, as text.

    Example:
        >>> TextObservation(text="warmer", reward=0.1).is_done
        False
    """

    text: str = ""
    """Text that the policy reads next, without the markers of ``answer_start`` and ``answer_end``.
    """
    is_done: bool = False
    """True if the rollout ends here."""
    reward: float = 0.0
    """Added to the rollout's score."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Counts of this step, summed over all rollouts of an RL step."""


class TextEnvironment(ABC):
    """An Environment whose subclasses read and write text. Its methods run in one event loop.

    A subclass defines `open` and `respond`. Run blocking code with ``asyncio.to_thread``: it would
    delay all other rollouts.
    """

    def __init__(self, *, config: EnvironmentConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """Create the environment of one rollout."""
        self.config = config
        self.tokenizer = tokenizer

    @abstractmethod
    async def open(self, prompt: Prompt) -> str:
        """Start a rollout; return the text of the first observation, or an empty text for none."""

    @abstractmethod
    async def respond(self, text: str) -> TextObservation:
        """Respond to the text of one completion, without its stop text."""

    async def close(self) -> None:
        """Free what the rollout used; the default does nothing."""
        return

    async def reset(self, prompt: Prompt) -> Observation | None:
        """Start a rollout; see `Environment`."""
        text = await self.open(prompt)
        return self._encode(TextObservation(text=text)) if text else None

    async def step(self, tokens: Sequence[int]) -> Observation:
        """Respond to one completion; see `Environment`."""
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return self._encode(await self.respond(text.removesuffix(self.config.call_end)))

    def _encode(self, response: TextObservation) -> Observation:
        """Encode the text between the markers, shortened so that it fits with both of them."""
        config, limit = self.config, self.config.max_observation_tokens
        # A tokenizer refuses half of a surrogate pair, which the policy may write in JSON.
        text = response.text.encode(errors="replace").decode()
        start, body, end = (
            self.tokenizer(each, add_special_tokens=False)["input_ids"]
            for each in (config.answer_start, text, config.answer_end)
        )
        if response.is_done:
            return Observation(is_done=True, reward=response.reward, metrics=response.metrics)
        num_left = max(0, limit - len(start) - len(end))
        is_cut = len(body) > num_left
        tokens = [*start, *body[:num_left], *end][:limit]
        metrics = response.metrics | ({"tool/cut_answers": 1.0} if is_cut else {})
        return Observation(tokens=tuple(tokens), reward=response.reward, metrics=metrics)
