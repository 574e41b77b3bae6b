"""Settings of the data: sources, tokenizer, prompt formatting and overlong prompts."""

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Annotated, ClassVar, Literal

from temper_engine_api.errors import ConfigError
from temper_trainer.config.run import INFERENCE_TASKS, RL_TASKS
from temper_trainer.settings.ranges import PositiveFloat, PositiveInt, Range, UnitFloat
from temper_trainer.settings.variants import Variant, settings, variant

PreferenceKind = Literal["pairs", "labels"]
"""pairs: a preferred and a rejected completion per prompt. labels: one completion per row, marked
as desirable or undesirable.
"""


@settings
class DataSource(Variant):
    """A data source: records of files or of a data set, or generated problems.

    An alternative is a class with the decorator ``variant(name)``; its fields are its settings.
    """

    default_name: ClassVar[str] = "jsonl"

    max_rows: PositiveInt | None = None
    """Use only the first rows; None uses all."""
    difficulty_key: str | None = None
    """Training data only: field with the difficulty of a row, a number; each epoch goes from the
    lowest to the highest, see ``data.shuffled_fraction``. Not for pairs and labels.
    """
    route_key: str | None = None
    """Field that selects the teacher of a row."""
    teacher_prompt_key: str | None = None
    """Field with another prompt for distillation.self_teacher, such as one that contains the
    solution: a string or chat messages, formatted like the prompt.
    """
    completion_key: str | None = None
    """Field with a given completion, text, for distillation.off_policy_fraction."""
    category_key: str | None = None
    """Held-out data only: field with the category of a problem, text or an integer; evaluations
    report each category.
    """
    reward: str | None = None
    """Reward of the source's completions, named as in reward.function, or a name in reward.sums;
    None uses reward.function or reward.components.
    """
    reward_key: str | None = None
    """Field with the name of a row's reward, in place of ``reward``: a name in reward.functions,
    reward.judges or reward.sums, or that of a registered function. An empty text or null stands
    for reward.function or reward.components.
    """
    environment: str | None = None
    """Name in ``environments`` of the environment of the source's rollouts; None uses
    ``environment``.
    """
    weight: PositiveFloat | None = None
    """Weight of a training source with data.train_sets: its fraction of the prompts of every step,
    relative to the other sources. None, for all of them, mixes all rows in one order.
    """

    def __post_init__(self) -> None:
        if self.reward is not None and self.reward_key is not None:
            raise ConfigError(
                f"reward is {self.reward} and reward_key is {self.reward_key}: remove one of them. "
                "The first selects the reward of the source, the second that of each row."
            )

    @property
    @abstractmethod
    def location(self) -> str:
        """Its files or its name, for messages."""

    @property
    def messages_key(self) -> str | None:
        """Field with a full conversation; a field of the sources that read records."""
        return None

    @property
    def margin_key(self) -> str | None:
        """Field with the margin of a pair; a field of the sources that read records."""
        return None

    @property
    def loss_weight_key(self) -> str | None:
        """Field with the weights in the loss; a field of the sources that read records."""
        return None


@settings
class RecordSource(DataSource):
    """Records, whose fields are found by name."""

    prompt_key: str = "question"
    """Field with the prompt: a string, or a list of chat messages. A nested field is OUTER.INNER,
    here and in the other keys.
    """
    answer_key: str = "answer"
    """Field with the reference answer."""
    extra_keys: tuple[str, ...] = ()
    """Additional fields for reward functions, available as ``prompt.extra[NAME]``."""
    messages_key: str | None = None
    """task sft only: field with a full conversation as a list of chat messages; replaces prompt_key
    and answer_key.
    """
    chosen_key: str = "chosen"
    """tasks dpo and rm only: field with the preferred completion."""
    rejected_key: str = "rejected"
    """tasks dpo and rm only: field with the other completion."""
    margin_key: str | None = None
    """task rm only: field with the margin by which the chosen completion's score should exceed the
    rejected one's, such as the difference of two ratings; None is 0 for all pairs.
    """
    label_key: str = "label"
    """task dpo with preference=kto only: field that is true for desirable completions, which
    answer_key names.
    """
    loss_weight_key: str | None = None
    """task sft and warm starts only: field with the weights in the loss, at least 0. Its value is a
    number for the row, or a list with a number for each answer token and the end token. With
    messages_key, a field of each message; 1 where it is missing. None weights all tokens equally.
    """


@settings
class FileSource(RecordSource):
    """Files of records."""

    paths: tuple[str, ...]
    """Local paths or fsspec URLs, at least one."""

    def __post_init__(self) -> None:
        DataSource.__post_init__(self)  # super() does not work in a class with slots
        if not self.paths:
            raise ConfigError("paths is empty: give at least one file.")

    @property
    def location(self) -> str:
        """The files, for messages."""
        return ", ".join(self.paths)


@variant("jsonl")
class JsonlSource(FileSource):
    """JSON lines: one object per line."""


@variant("parquet")
class ParquetSource(FileSource):
    """Parquet files, of which only the needed columns are read."""


@variant("datasets")
class DatasetsSource(RecordSource):
    """A data set of the Hugging Face library ``datasets``, which is an extra."""

    path: str
    """Name of the data set on the Hub, or its directory."""
    split: str = "train"
    """Name of the split."""

    @property
    def location(self) -> str:
        """The data set and its split, for messages."""
        return f"{self.path}[{self.split}]"


@variant("arithmetic")
class ArithmeticSource(DataSource):
    """Generated word problems."""

    max_rows: PositiveInt
    """Number of problems to generate."""
    max_operations: Annotated[int, Range(at_least=2)] = 2
    """Most operations of a problem. 2: one or two. More: any number up to it, equally likely."""
    split: Literal["train", "test"] = "train"
    """Part of all problems; the two never share one."""
    seed: int = 0
    """Seed of the problems."""
    wrong_first_operation: UnitFloat = 0.0
    """Fraction of demonstrations with a wrong first operation and hence a wrong answer."""
    difficulty_key: Literal["operations"] | None = None
    """operations: the difficulty is the number of operations."""
    route_key: Literal["operations"] | None = None
    """operations: the route, which selects the teacher, is one, two or more."""
    teacher_prompt_key: Literal["solved"] | None = None
    """solved: the teacher's prompt is the solution, followed by the problem."""
    completion_key: Literal["solution"] | None = None
    """solution: the given completion is the demonstrated solution."""
    category_key: Literal["operations"] | None = None
    """operations: the category in evaluations is one, two or more."""
    reward_key: Literal["operations"] | None = None
    """operations: the reward of a problem is named one, two or more."""

    @property
    def location(self) -> str:
        """The split, for messages."""
        return f"arithmetic[{self.split}]"


RESERVED_SET_NAMES = ("greedy", "sampled", "eval", "sft", "preference", "dropped")
"""Parts of the metrics of data.eval, which has no name; no other held-out data may be called so."""


MIN_BPE_ENTRIES = 259
"""Entries of byte-level BPE without merges: 256 bytes and three special tokens."""


@settings
class TokenizerConfig:
    """Tokenizer loaded from a directory, or trained on the training source."""

    kind: Literal["pretrained", "word_level", "bpe"] = "pretrained"
    """pretrained: load ``path``; word_level: train on words and single digits; bpe: train
    byte-level BPE.
    """
    path: str | None = None
    """Directory of a pretrained tokenizer; None takes the actor's model.path."""
    vocab_size: Annotated[int, Range(at_least=MIN_BPE_ENTRIES)] | None = None
    """bpe only, required there: number of vocabulary entries, of which 256 are bytes and three are
    special tokens.
    """

    def __post_init__(self) -> None:
        if self.kind != "pretrained" and self.path is not None:
            raise ConfigError(
                f"tokenizer.path has no effect with tokenizer.kind {self.kind}: remove it."
            )
        if (self.kind == "bpe") != (self.vocab_size is not None):
            raise ConfigError(
                f"tokenizer.vocab_size is {self.vocab_size} with kind {self.kind}: bpe needs it, "
                "and the other kinds do not take it."
            )


@settings
class DataConfig:
    """Training and evaluation data, and how prompts are tokenized."""

    train: DataSource | None = None
    """Training data; required unless the task only evaluates or generates."""
    train_sets: Mapping[str, DataSource] = field(default_factory=dict)
    """Tasks rl and distill only: more training data by name, such as train_sets.code.paths; every
    step has prompts of all sources.
    """
    eval: DataSource | None = None
    """Held-out data to evaluate on, in tasks sft, dpo and rm of the form of data.train; None
    evaluates only on eval_sets.
    """
    eval_sets: Mapping[str, DataSource] = field(default_factory=dict)
    """More held-out data by name, such as eval_sets.math500.paths; metrics are eval/NAME/... ."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """Tokenizer of all roles, loaded or trained on the data."""
    max_prompt_tokens: PositiveInt = 1024
    """Maximum prompt length in tokens."""
    overlong_prompts: Literal["error", "drop"] = "error"
    """Longer prompts, and demonstrations that do not fit batching.max_tokens: error stops with the
    first of them, drop removes and counts them.
    """
    prompt_template: str = "{prompt}"
    """Text around string prompts; must contain {prompt}. Chat messages go through the chat
    template.
    """
    string_prompts: Literal["text", "user_message"] = "text"
    """String prompts are used as plain text, or as one user message that goes through the chat
    template.
    """
    chat_template: str | None = None
    """Jinja chat template that replaces the tokenizer's own."""
    tools_path: str | None = None
    """YAML or JSON file with the tools that the chat template describes in prompts: a list,
    optionally under ``tools``, of schemas {type: function, function: ...}; an entry may have its
    schema under ``tool_schema``.
    """
    shuffle: bool = True
    """Shuffle each epoch by (run.seed, epoch); False keeps the order of the source. With a
    difficulty_key, this is the order of rows of equal difficulty.
    """
    shuffled_fraction: UnitFloat = 0.0
    """Only with a difficulty_key: fraction of the rows of an epoch that exchange their positions at
    random, in [0, 1]. 0 is strictly from easy to hard, 1 a random order.
    """
    streaming: bool = False
    """Read and tokenize data.train during training, in place of loading all rows first. Task sft
    reads in the order of the source, and shuffles within a buffer. Tasks rl and distill shuffle all
    rows; the source must be uncompressed local JSON lines, or of kind datasets.
    """
    streaming_buffer: PositiveInt = 1000
    """Size of the shuffle buffer in rows; only with streaming and shuffle, in task sft
    or a warm start without data of its own."""
    train_on: Literal["last", "all"] = "all"
    """Assistant turns of a conversation that are trained; only with messages_key."""

    def __post_init__(self) -> None:
        for name in self.eval_sets:
            if name in RESERVED_SET_NAMES or not re.fullmatch(r"[\w.-]+", name):
                raise ConfigError(
                    f"data.eval_sets has the name {name!r}, but metrics are named eval/NAME/...: "
                    "use letters, digits and . _ -, and none of "
                    f"{', '.join(RESERVED_SET_NAMES)}."
                )
        weights = [source.weight for source in self.train_sources.values()]
        if len({weight is None for weight in weights}) > 1:
            raise ConfigError(
                f"the weights of data.train and data.train_sets are {weights}: set all of them, or "
                "none."
            )
        if "{prompt}" not in self.prompt_template:
            raise ConfigError(
                f"data.prompt_template is {self.prompt_template!r}, but must contain {{prompt}}."
            )

    @property
    def train_sources(self) -> dict[str, DataSource]:
        """All training data by the key that sets it: data.train, then data.train_sets.NAME."""
        unnamed = {} if self.train is None else {"data.train": self.train}
        return unnamed | {f"data.train_sets.{name}": each for name, each in self.train_sets.items()}

    @property
    def eval_sources(self) -> dict[str, DataSource]:
        """All held-out data by the key that sets it: data.eval first, then data.eval_sets.NAME."""
        unnamed = {} if self.eval is None else {"data.eval": self.eval}
        return unnamed | {f"data.eval_sets.{name}": each for name, each in self.eval_sets.items()}

    @property
    def sources(self) -> dict[str, DataSource]:
        """All data sources by their keys, except the data of a warm start."""
        return self.train_sources | self.eval_sources


def name_eval_set(key: str) -> str:
    """Return the name of a held-out source in metrics; empty for ``data.eval``.

    Example:
        >>> [name_eval_set(key) for key in ("data.eval", "data.eval_sets.math500")]
        ['', 'math500']
    """
    return key.removeprefix("data.eval").removeprefix("_sets.")


def find_data_conflicts(
    data: DataConfig, *, task: str, tokens_per_update: int | None, total_epochs: float | None
) -> Iterator[str]:
    """Yield settings of the data that the task does not support.

    Args:
        data: Settings of the data.
        task: Task of the run.
        tokens_per_update: Value of batching.tokens_per_update.
        total_epochs: Value of run.total_epochs.
    """
    if not (data.sources if task in INFERENCE_TASKS else data.train):
        key = "data.eval" if task in INFERENCE_TASKS else "data.train"
        yield f"{key} is not set, the data of task {task}: set {key}.paths."
    if data.train_sets and task not in RL_TASKS:
        yield (
            f"data.train_sets is set in task {task}: only tasks rl and distill mix several "
            "sources. List all files in data.train.paths."
        )
    train = data.train
    if all(source.weight is None for source in data.train_sources.values()):
        without = [key for key, each in data.train_sources.items() if each.difficulty_key is None]
        if without and len(without) < len(data.train_sources):
            yield (
                f"{without[0]}.difficulty_key is not set, but that of another training source is, "
                "and all rows are sorted together: set all of them or none, or set the weight of "
                "each source, so that each is sorted for itself."
            )
    if data.streaming and task not in ("sft", *RL_TASKS):
        yield (
            f"data.streaming has no effect in task {task}: only tasks sft, rl and distill use it. "
            "Remove it."
        )
    if task != "sft":
        only = {
            "data.train.messages_key": train is not None and train.messages_key is not None,
            "batching.tokens_per_update": tokens_per_update is not None,
        }
        for key, is_set in only.items():
            if is_set:
                yield (f"{key} has no effect in task {task}: only task sft uses it. Remove it.")
    is_unknown = (data.streaming and task == "sft") or tokens_per_update is not None
    if total_epochs is not None and is_unknown:
        yield (
            f"run.total_epochs is {total_epochs}, but with data.streaming or "
            "batching.tokens_per_update the number of steps per pass is unknown: set "
            "run.total_steps."
        )
    kind = data.tokenizer.kind
    is_sorted = train is not None and train.difficulty_key is not None
    is_generated = isinstance(train, ArithmeticSource)
    reasons = (
        (is_sorted, "data.train.difficulty_key sorts all rows", "remove one of them"),
        (
            kind != "pretrained",
            f"data.tokenizer.kind {kind} is trained on all rows",
            "use a pretrained one",
        ),
        (is_generated, "data.train is arithmetic, which makes all rows", "remove one of them"),
    )
    for applies, reason, remedy in reasons if data.streaming else ():
        if applies:
            yield f"data.streaming is true, but {reason} before the run: {remedy}."
    if data.streaming and task in RL_TASKS:
        yield from _find_mapping_conflicts(data)


def describe_overlong_remedies(data: DataConfig) -> str:
    """Return what to do about a row that is longer than a limit."""
    # Tasks rl and distill refuse to drop streamed rows, see `_find_mapping_conflicts`.
    where = ", in task sft," if data.streaming else ""
    return f"raise it, remove the row, or{where} set data.overlong_prompts to drop"


def _find_mapping_conflicts(data: DataConfig) -> Iterator[str]:
    """Yield what tasks rl and distill need all rows for, so that they cannot stream them."""
    source = data.train
    is_local = isinstance(source, JsonlSource) and all(
        "://" not in path and "::" not in path and not path.endswith((".gz", ".bz2", ".xz", ".zst"))
        for path in source.paths
    )
    reasons = (
        (bool(data.train_sets), "data.train_sets mixes sources", "name all files in data.train"),
        (
            data.overlong_prompts == "drop",
            "data.overlong_prompts drop removes rows before the run",
            "remove these rows from the file, or raise data.max_prompt_tokens",
        ),
        (
            source is not None and source.reward_key is not None,
            "data.train.reward_key selects the rewards that are started with the run",
            "use data.train.reward",
        ),
        (
            not is_local and not isinstance(source, DatasetsSource | ArithmeticSource | None),
            "rows can be found only in uncompressed local JSON lines and data sets",
            "decompress or convert the files, or use data.train=datasets",
        ),
    )
    for applies, reason, remedy in reasons:
        if applies:
            yield f"data.streaming is true, but {reason}: {remedy}."
