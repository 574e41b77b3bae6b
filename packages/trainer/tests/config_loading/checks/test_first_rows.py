"""`--check` tokenizes the first rows as the run does."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from temper_engine_api.checkpoint import PartReport, report_part
from temper_engine_api.errors import ConfigError
from temper_trainer.checkpoint.checkpointer import Checkpointer
from temper_trainer.checkpoint.trainer_state import TrainerState
from temper_trainer.config.data import TokenizerConfig
from temper_trainer.config_loading import load
from temper_trainer.config_loading.checks.external_checks import check_external_objects
from temper_trainer.config_loading.checks.first_rows import check_first_rows
from temper_trainer.data.prompts import encode_prompts
from temper_trainer.data.rows import DataError
from temper_trainer.data.sources import load_rows
from temper_trainer.data.tokenizer import build_tokenizer, load_or_train
from temper_trainer.types import DataCursor

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
Settings = Callable[..., list[str]]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Return the settings of a run on these rows with a pretrained tokenizer."""
    texts = ["one two three four five", "<user><assistant><system>"]
    word_level = TokenizerConfig(kind="word_level")
    build_tokenizer(word_level, model_path=None, texts=texts, directory=tmp_path / "tokenizer")

    def write(*questions: object, tokenizer: str = "pretrained") -> list[str]:
        rows = [{"question": question, "answer": "one"} for question in questions]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        pretrained = (
            ["data.tokenizer.kind=pretrained", f"+data.tokenizer.path={tmp_path}/tokenizer"]
            if tokenizer == "pretrained"
            else [f"data.tokenizer.kind={tokenizer}"]
        )
        return [
            *("experiment=quickstart", "warm_start=null", "~data.eval", "~data.train"),
            *("+data.train.name=jsonl", f"+data.train.paths=[{tmp_path}/rows.jsonl]"),
            *(f"run.dir={tmp_path}/run", *pretrained),
        ]

    return write


def refusal(overrides: list[str]) -> str:
    config = load(overrides).config
    check_external_objects(config)
    with pytest.raises(ConfigError) as caught:
        check_first_rows(config)
    return str(caught.value)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("tokenizer", ["pretrained", "word_level"])
def test_prompt_of_chat_messages_is_as_long_as_in_the_run(
    settings: Settings, tokenizer: str
) -> None:
    # <, user and >, four words of which each has its space, <, assistant and >.
    taken = settings(user("one two three four"), tokenizer=tokenizer)
    taken.append(f"data.chat_template='{CHAT}'")
    check_first_rows(load([*taken, "data.max_prompt_tokens=10"]).config)
    config = load([*taken, "data.max_prompt_tokens=9"]).config
    rows = load_rows(config.data.train)
    texts = [CHAT, *(text for row in rows for text in row.texts)]
    of_the_run = load_or_train(config.data.tokenizer, model_path=None, texts=texts)
    with pytest.raises(DataError, match="the prompt has 10 tokens") as caught:
        encode_prompts(rows, of_the_run, config.data)
    assert refusal([*taken, "data.max_prompt_tokens=9"]) == f"data.train: {caught.value}"


def test_plain_prompt_is_as_long_as_with_the_pretrained_tokenizer(settings: Settings) -> None:
    taken = settings("one two three")
    check_first_rows(load([*taken, "data.max_prompt_tokens=3"]).config)
    text = refusal([*taken, "data.max_prompt_tokens=2"])
    assert "rows.jsonl:1: the prompt has 3 tokens, but data.max_prompt_tokens is 2" in text


def test_prompt_that_leaves_too_few_positions_for_a_completion_is_refused(
    settings: Settings, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    fields = {"model_type": "qwen2", "max_position_embeddings": 24}
    (tmp_path / "model" / "config.json").write_text(json.dumps(fields))
    taken = [
        *settings("one two", "one two three"),
        "~actor.engine.model.architecture",
        f"actor.engine.model.path={tmp_path}/model",
    ]
    check_first_rows(load([*taken, "sampling.max_tokens=21"]).config)
    with pytest.raises(ConfigError) as caught:
        check_first_rows(load([*taken, "sampling.max_tokens=22"]).config)
    assert (
        f"data.train: {tmp_path}/rows.jsonl:2: the prompt has 3 tokens and sampling.max_tokens is "
        f"22, but the model in {tmp_path}/model has 24 positions"
    ) in str(caught.value)
    streamed = [*taken, "sampling.max_tokens=22", "data.streaming=true", "run.total_steps=1"]
    with pytest.raises(ConfigError, match=r"lower sampling\.max_tokens, or remove the row\."):
        check_first_rows(load(streamed).config)


def test_demonstration_that_the_model_cannot_train_is_refused(settings: Settings) -> None:
    taken = [*settings("one two three"), "task=sft"]
    # The prompt, one word of the answer and the end token.
    positions = "actor.engine.model.architecture.max_position_embeddings"
    check_first_rows(load([*taken, "data.max_prompt_tokens=3", f"{positions}=5"]).config)
    text = refusal([*taken, "data.max_prompt_tokens=3", f"{positions}=4"])
    assert f"prompt and solution have 5 tokens, but {positions} is 4" in text


def test_message_that_the_chat_template_refuses_is_named(settings: Settings) -> None:
    template = '{{ raise_exception("no system role") }}'
    text = refusal([*settings(user("one")), f"data.chat_template='{template}'"])
    assert "rows.jsonl:1: the chat template cannot render the messages: no system role." in text


def test_rows_that_may_be_dropped_are_refused_only_if_there_are_no_others(
    settings: Settings,
) -> None:
    dropping = ["data.overlong_prompts=drop", "data.max_prompt_tokens=2"]
    few = settings(*["one two three"] * 99)
    assert "all 99 prompts are longer than data.max_prompt_tokens" in refusal([*few, *dropping])
    check_first_rows(load([*settings(*["one two three"] * 100), *dropping]).config)


def test_remedies_for_long_rows_are_accepted_with_streaming(settings: Settings) -> None:
    streamed = [*settings("one two three"), "data.streaming=true", "run.total_steps=1"]
    remedy = "raise it, remove the row, or, in task sft, set data.overlong_prompts to drop."
    prompts = [*streamed, "data.max_prompt_tokens=2"]
    assert f"data.max_prompt_tokens is 2: {remedy}" in refusal(prompts)
    streamed.remove("warm_start=null")
    lengths = ["data.max_prompt_tokens=3", "sampling.max_tokens=1", "batching.max_tokens=4"]
    demonstrations = [*streamed, *lengths, "warm_start.data=null"]
    assert f"batching.max_tokens is 4: {remedy}" in refusal(demonstrations)


def save_step(run: Path, *, texts: list[str]) -> None:
    """Save a checkpoint and a trained tokenizer, as a first start does."""

    def write_weights(directory: str) -> list[PartReport]:
        Path(directory, "weights").write_bytes(bytes(200))
        return [report_part(directory, ["weights"])]

    state = TrainerState(
        phase="rl", step=1, cursor=DataCursor(), weight_version=1, config_digest="ab"
    )
    checkpointer = Checkpointer(root=run / "checkpoints", max_to_keep=None)
    checkpointer.save(state, roles={"actor": write_weights}, topology={})
    word_level = TokenizerConfig(kind="word_level")
    build_tokenizer(word_level, model_path=None, texts=texts, directory=run / "tokenizer")


@pytest.mark.parametrize("resume", ["auto", "{dir}/run/checkpoints/step_00000001"])
def test_rows_of_a_resumed_run_are_checked_with_its_saved_tokenizer(
    settings: Settings, tmp_path: Path, resume: str
) -> None:
    save_step(tmp_path / "run", texts=["one two three"])
    resumed = [f"run.resume={resume.format(dir=tmp_path)}"]
    check_first_rows(load([*settings("one two", tokenizer="word_level"), *resumed]).config)
    text = refusal([*settings("one four", tokenizer="word_level"), *resumed])
    assert "was trained on other texts and would change 'one four'" in text
    overlong = [*settings("one two three", tokenizer="word_level"), "data.max_prompt_tokens=2"]
    assert "rows.jsonl:1: the prompt has 3 tokens" in refusal([*overlong, *resumed])


def test_check_writes_nothing_into_the_folder_of_a_resumed_run(
    settings: Settings, tmp_path: Path
) -> None:
    save_step(tmp_path / "run", texts=["one two three"])
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    taken = settings("one two", tokenizer="word_level")
    check_first_rows(load([*taken, "run.resume=auto"]).config)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


@pytest.mark.parametrize(
    ("task", "row"),
    [
        (["task=dpo", "ref=frozen"], {"question": "one", "chosen": "two", "rejected": "three"}),
        (["task=sft"], {"question": "one", "answer": "two"}),
    ],
)
def test_held_out_data_of_supervised_tasks_is_checked_in_its_own_form(
    settings: Settings, tmp_path: Path, task: list[str], row: dict[str, str]
) -> None:
    shared = [*settings("one"), *task, "batching.max_tokens=5", "~run.eval_every"]
    shared += ["~run.eval_sampled", "~run.eval_sampling", "~sampling"]
    long = {key: text if key == "question" else f"{text} " * 9 for key, text in row.items()}
    for name, content in (("rows", row), ("test", long)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(content) + "\n")
    held_out = ["+data.eval.name=jsonl", f"+data.eval.paths=[{tmp_path}/test.jsonl]"]
    message = refusal([*shared, *held_out])
    assert message.startswith("data.eval: ")
    assert "test.jsonl:1: prompt and solution have 1" in message
