"""Where prompts come from, how they become tokens, and what happens to those that do not fit."""

from dataclasses import dataclass, field
from typing import Literal

from temper_engine_api.errors import ConfigError
from temper_trainer.config.ranges import check_range


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceConfig:
    """One set of problems."""

    kind: Literal["jsonl", "parquet", "datasets", "arithmetic"] = "jsonl"
    """jsonl and parquet read files; datasets is the Hugging Face library; arithmetic generates word problems."""
    paths: tuple[str, ...] = ()
    """Files of a jsonl or parquet source, any fsspec URL; for datasets one dataset name or directory."""
    split: str = "train"
    """datasets: the split; arithmetic: train, or test (problems never trained on)."""
    prompt_key: str = "question"
    """Field with the prompt: a string, or a list of chat messages. A field within a field is OUTER.INNER, here and below."""
    answer_key: str = "answer"
    """Field with the reference answer."""
    extra_keys: tuple[str, ...] = ()
    """Further fields that a reward function may look at: they are in the prompt's ``extra``, by these names."""
    messages_key: str | None = None
    """task sft: field with a whole conversation, a list of chat messages, in place of prompt_key and answer_key."""
    chosen_key: str = "chosen"
    """tasks dpo and rm: field with the preferred completion, beside prompt_key."""
    rejected_key: str = "rejected"
    """tasks dpo and rm: field with the other completion."""
    route_key: str | None = None
    """Field with the route of a row: the value by which a teacher is chosen. For arithmetic, operations (one or two) is such a field."""
    max_rows: int | None = None
    """Use only the first rows; None uses all. For arithmetic, how many problems to generate (needed there)."""
    seed: int = 0
    """arithmetic only: which problems are drawn."""
    wrong_first_operation: float = 0.0
    """arithmetic only: share of demonstrations whose first operation is wrong, carried through to a wrong answer."""

    def __post_init__(self) -> None:
        check_range("max_rows", self.max_rows, at_least=1)
        check_range("wrong_first_operation", self.wrong_first_operation, at_least=0, at_most=1)
        if self.kind == "arithmetic":
            if self.split not in ("train", "test"):
                raise ConfigError(
                    f"split is {self.split!r}, but must be train or test (never trained on) for kind arithmetic."
                )
            if self.route_key not in (None, "operations"):
                raise ConfigError(
                    f"route_key is {self.route_key!r}, but a source of kind arithmetic has one: operations (one or two)."
                )
            if self.paths or self.max_rows is None:
                raise ConfigError(
                    "a source of kind arithmetic takes no paths, and needs max_rows: how many problems to generate."
                )
        elif not self.paths:
            raise ConfigError(f"a source of kind {self.kind} needs paths.")
        if self.kind != "arithmetic" and (self.wrong_first_operation or self.seed):
            raise ConfigError(
                f"wrong_first_operation and seed have no effect on a source of kind {self.kind}: remove them."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig:
    """A tokenizer from a directory, or one trained on the training source."""

    kind: Literal["pretrained", "word_level", "bpe"] = "pretrained"
    """pretrained loads ``path``; word_level splits words and single digits; bpe is byte-level BPE."""
    path: str | None = None
    """Directory of a pretrained tokenizer; None takes the actor's model.path."""
    vocab_size: int | None = None
    """bpe only, where it is needed: entries of the vocabulary."""

    def __post_init__(self) -> None:
        check_range("tokenizer.vocab_size", self.vocab_size, at_least=1)
        if self.kind != "pretrained" and self.path is not None:
            raise ConfigError(
                f"tokenizer.path has no effect with tokenizer.kind {self.kind}: remove it."
            )
        if (self.kind == "bpe") != (self.vocab_size is not None):
            raise ConfigError(
                f"tokenizer.vocab_size is {self.vocab_size} with kind {self.kind}: bpe needs it, the others take none."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Training and held-out problems."""

    train: SourceConfig
    """What is trained on."""
    eval: SourceConfig | None = None
    """What is evaluated on; None never evaluates."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """See TokenizerConfig."""
    max_prompt_tokens: int = 1024
    """Longest prompt."""
    overlong_prompts: Literal["error", "drop"] = "error"
    """What happens to longer ones: refuse the run naming the first, or drop and count them."""
    prompt_template: str = "{prompt}"
    """Around a string prompt, before tokenisation; chat messages go through the tokenizer's chat template instead."""
    string_prompts: Literal["text", "user_message"] = "text"
    """What a string prompt is: text as it stands, or one message of a user, which goes through the chat template."""
    chat_template: str | None = None
    """A Jinja chat template in place of the tokenizer's own."""
    tools_path: str | None = None
    """A YAML or JSON file with the tools that the chat template describes in each prompt: a list, alone or under ``tools``, of schemas
    {type: function, function: ...}; an entry may hold its schema under ``tool_schema``."""
    shuffle: bool = True
    """Order of each epoch is a pure function of (run.seed, epoch); False keeps the file's."""
    streaming: bool = False
    """task sft: read data.train while training, in the file's order but for a buffer, in place of all of it before the first step."""
    streaming_buffer: int = 1000
    """Rows that a stream is shuffled within; only with streaming and shuffle."""
    train_on: Literal["last", "all"] = "all"
    """With messages_key: which assistant turns are trained."""

    def __post_init__(self) -> None:
        check_range("data.max_prompt_tokens", self.max_prompt_tokens, at_least=1)
        check_range("data.streaming_buffer", self.streaming_buffer, at_least=1)
        if "{prompt}" not in self.prompt_template:
            raise ConfigError(
                f"data.prompt_template is {self.prompt_template!r}, but must contain {{prompt}} where the prompt goes."
            )
