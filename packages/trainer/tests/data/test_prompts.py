"""Test how rows become token ids."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from temper_engine_api.errors import ConfigError
from temper_trainer.config.data import DataConfig, JsonlSource, TokenizerConfig
from temper_trainer.data.prompts import (
    encode_demonstrations,
    encode_preferences,
    encode_prompts,
    read_tools,
)
from temper_trainer.data.rows import ChatMessage, DataError, LabeledRow, PairRow, Row
from temper_trainer.data.tokenizer import build_tokenizer
from temper_trainer.types import LabeledCompletion, Pair

CONFIG = DataConfig(train=JsonlSource(paths=("unused",)), prompt_template="Q: {prompt}\n")
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if "
    "add_generation_prompt %}[assistant]{% endif %}"
)


def row(row_id: int, prompt: str | tuple[ChatMessage, ...], solution: str = "#### 2") -> Row:
    return Row(
        row_id=row_id, prompt=prompt, answer="#### 2", solution=solution, location=f"file:{row_id}"
    )


@pytest.fixture
def tokenizer(tmp_path: Path) -> PreTrainedTokenizerBase:
    texts = ["Q: 1 + {1}?\n", "#### 2", "one two three four", "[user] one [assistant]"]
    return build_tokenizer(
        TokenizerConfig(kind="word_level"), model_path=None, texts=texts, directory=tmp_path
    )


def test_string_prompt_with_braces_is_inserted_into_the_template(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    ([prompt], num_dropped) = encode_prompts([row(4, "1 + {1}?")], tokenizer, CONFIG)
    assert (prompt.prompt_id, prompt.text, prompt.answer, num_dropped) == (
        4,
        "Q: 1 + {1}?\n",
        "#### 2",
        0,
    )
    assert tokenizer.decode(prompt.tokens) == "Q: 1 + {1}?\n"


def test_chat_messages_are_rendered_with_a_generation_prompt(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    messages = (ChatMessage(role="user", content="one two"),)
    ([prompt], _) = encode_prompts(
        [row(0, messages)], tokenizer, replace(CONFIG, chat_template=TEMPLATE)
    )
    assert prompt.text == "[user] one two\n[assistant]"
    assert tokenizer.decode(prompt.tokens) == prompt.text
    with pytest.raises(
        ConfigError,
        match="file:0 is a list of chat messages, but the tokenizer has no chat template",
    ):
        encode_prompts([row(0, messages)], tokenizer, CONFIG)


WITH_TOOLS = "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}" + TEMPLATE
TOOL = {"type": "function", "function": {"name": "two", "description": "counts", "parameters": {}}}


@pytest.mark.parametrize(
    "content", [[TOOL], {"tools": [{"class_name": "package.Class", "tool_schema": TOOL}]}]
)
def test_chat_template_describes_tools_of_a_file(
    content: object, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    (tmp_path / "tools.json").write_text(json.dumps(content))
    config = replace(CONFIG, chat_template=WITH_TOOLS, tools_path=str(tmp_path / "tools.json"))
    ([prompt], _) = encode_prompts(
        [row(0, (ChatMessage(role="user", content="one"),))], tokenizer, config
    )
    assert prompt.text == "<two>[user] one\n[assistant]"


def test_tools_that_the_template_ignores_are_refused(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = tmp_path / "tools.json"
    path.write_text(json.dumps([TOOL]))
    config = replace(CONFIG, chat_template=TEMPLATE, tools_path=str(path))
    with pytest.raises(ConfigError, match="the chat template does not use tools"):
        encode_prompts([row(0, (ChatMessage(role="user", content="one"),))], tokenizer, config)
    with pytest.raises(ConfigError, match="no prompt is a list of chat messages"):
        encode_prompts([row(0, "one")], tokenizer, config)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "has no list of tools"),
        ("[{function: sum}]", "entry 1 is {'function': 'sum'}"),
        ("[", "cannot be read"),
    ],
)
def test_file_without_schemas_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").write_text(content)
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_tools(str(tmp_path / "tools.yaml"))


def test_begin_token_of_the_tokenizer_is_kept_and_its_end_token_removed(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    specials = [("<unk>", 2), ("<eos>", 1)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<unk> $A <eos>", special_tokens=specials
    )
    ([prompt], _) = encode_prompts(
        [row(0, "one")], tokenizer, replace(CONFIG, prompt_template="{prompt}")
    )
    assert tokenizer.convert_ids_to_tokens(prompt.tokens) == ["<unk>", "one"]


def test_demonstration_ends_with_the_end_token(tokenizer: PreTrainedTokenizerBase) -> None:
    ([demonstration], _) = encode_demonstrations(
        [row(0, "one", solution="three four")], tokenizer, CONFIG
    )
    assert tokenizer.convert_ids_to_tokens(demonstration.tokens) == ["<unk>", " four", "<eos>"]
    assert demonstration.prompt.text == "Q: one\n"


def test_overlong_prompt_is_refused_by_name_or_dropped_and_counted(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    rows = [row(0, "one"), row(1, "one two three four"), row(2, "two")]
    short = replace(
        CONFIG, max_prompt_tokens=5
    )  # Q : _one \n: the template costs three tokens, a word one
    with pytest.raises(
        DataError, match=r"file:1: the prompt has 7 tokens, but data.max_prompt_tokens is 5"
    ):
        encode_prompts(rows, tokenizer, short)
    prompts, num_dropped = encode_prompts(rows, tokenizer, replace(short, overlong_prompts="drop"))
    assert ([prompt.prompt_id for prompt in prompts], num_dropped) == ([0, 2], 1)
    demonstrations, num_dropped = encode_demonstrations(
        rows, tokenizer, replace(short, overlong_prompts="drop")
    )
    assert ([item.prompt.prompt_id for item in demonstrations], num_dropped) == ([0, 2], 1)


def test_both_completions_of_an_overlong_prompt_are_dropped(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    rows = [
        PairRow(chosen=row(i, prompt, " two"), rejected=row(i, prompt, " four"), margin=0.5 * i)
        for i, prompt in enumerate(["one two three four", "two"])
    ]
    config = replace(CONFIG, max_prompt_tokens=5, overlong_prompts="drop")
    (pair,), num_dropped = encode_preferences(rows, tokenizer, config)
    assert isinstance(pair, Pair)
    assert (pair.chosen.prompt.prompt_id, pair.margin, num_dropped) == (1, 0.5, 1)
    assert tokenizer.convert_ids_to_tokens(pair.rejected.tokens) == [" four", "<eos>"]
    labeled = [LabeledRow(row=each.chosen, is_desirable=False) for each in rows]
    (completion,), num_dropped = encode_preferences(labeled, tokenizer, config)
    assert isinstance(completion, LabeledCompletion)
    assert (completion.is_desirable, num_dropped) == (False, 1)


def test_dataset_without_remaining_rows_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DataError, match="all 1 prompts are longer than"):
        encode_prompts(
            [row(0, "one")],
            tokenizer,
            replace(CONFIG, max_prompt_tokens=1, overlong_prompts="drop"),
        )


@pytest.mark.parametrize("text", ["", "zzz", "zzz qqq"])
def test_prompt_without_a_known_token_is_refused(
    tokenizer: PreTrainedTokenizerBase, text: str
) -> None:
    config = replace(CONFIG, prompt_template="{prompt}")
    with pytest.raises(DataError, match=r"file:5: .* the tokenizer knows none of its words"):
        encode_prompts([row(5, text)], tokenizer, config)
    assert encode_prompts([row(5, f"{text} one")], tokenizer, config)[0]


def test_no_rows_are_no_prompts(tokenizer: PreTrainedTokenizerBase) -> None:
    assert encode_prompts([], tokenizer, CONFIG) == ([], 0)
    assert encode_demonstrations([], tokenizer, CONFIG) == ([], 0)


def test_template_without_a_placeholder_for_the_prompt_is_refused(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    with pytest.raises(ConfigError, match=r"must contain \{prompt\}"):
        encode_prompts([row(0, "one")], tokenizer, replace(CONFIG, prompt_template="Question:"))


def test_string_prompt_can_be_a_user_message(tokenizer: PreTrainedTokenizerBase) -> None:
    config = replace(
        CONFIG,
        prompt_template="{prompt} two",
        string_prompts="user_message",
        chat_template=TEMPLATE,
    )
    ([prompt], _) = encode_prompts([row(0, "one")], tokenizer, config)
    assert prompt.text == "[user] one two\n[assistant]"


def test_teachers_prompt_is_formatted_like_the_prompt_and_has_the_same_limit(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    rows = [replace(row(0, "one"), teacher_prompt="three two one"), row(1, "four")]
    prompts, _ = encode_prompts(rows, tokenizer, CONFIG)
    assert tokenizer.decode(prompts[0].tokens) == "Q: one\n"
    assert tokenizer.decode(prompts[0].teacher_tokens) == "Q: three two one\n"
    assert prompts[1].teacher_tokens == ()
    limit = len(prompts[0].tokens)
    with pytest.raises(DataError, match="file:0: the teacher's prompt has"):
        encode_prompts(rows, tokenizer, replace(CONFIG, max_prompt_tokens=limit))


def test_given_completion_ends_with_the_end_token(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [replace(row(0, "one"), completion="one two"), row(1, "four")]
    prompts, _ = encode_prompts(rows, tokenizer, CONFIG)
    assert tokenizer.decode(prompts[0].given_completion[:-1]) == "one two"
    assert prompts[0].given_completion[-1] == tokenizer.eos_token_id
    assert prompts[1].given_completion == ()
