"""A model that scores, under the trainer's signature of a reward function."""

from pathlib import Path

import pytest

pytest.importorskip("temper_trainer", reason="needs temper-trainer")

import torch
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

from temper_legacy_shim.errors import UsageError
from temper_legacy_shim.old_reward_models import by_model
from temper_trainer.config.data import TokenizerConfig
from temper_trainer.config.reward import RewardConfig
from temper_trainer.data.tokenizer import build_tokenizer
from temper_trainer.reward.registry import resolve_reward
from temper_trainer.types import Prompt

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
PROMPT = Prompt(
    prompt_id=0,
    text="user: one two\n",
    tokens=(1,),
    answer="",
    extra={"prompt": [{"role": "user", "content": "one two"}], "text": "one"},
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("tokenizer")
    made = build_tokenizer(
        TokenizerConfig(kind="bpe", vocab_size=300),
        model_path=None,
        texts=["user: one two assistant: three"],
        directory=folder,
    )
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def config(tokenizer: PreTrainedTokenizerBase) -> Qwen2Config:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    return Qwen2Config(
        vocab_size=len(tokenizer), num_labels=1, pad_token_id=tokenizer.pad_token_id, **sizes
    )


@pytest.fixture(scope="module")
def scorer(
    tokenizer: PreTrainedTokenizerBase,
    config: Qwen2Config,
    tmp_path_factory: pytest.TempPathFactory,
) -> str:
    folder = tmp_path_factory.mktemp("scorer")
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def expected(path: str, text: str, *, first: int | None = None) -> float:
    """Return the hidden state after the last token, times the head's one row."""
    model = Qwen2ForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(
        path
    )  # transformers' own reading of the files, as any user of the model has it
    with torch.inference_mode():
        hidden = model.model(
            input_ids=torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"][:first]])
        ).last_hidden_state
        return float(hidden[0, -1] @ model.score.weight[0])


def test_a_conversation_goes_through_the_models_own_template(scorer: str) -> None:
    result = by_model(PROMPT, "three", path=scorer, dtype="float32", device="cpu")
    assert result == pytest.approx(expected(scorer, "user: one two\nassistant: three\n"), abs=1e-6)
    assert result != pytest.approx(
        by_model(PROMPT, "two", path=scorer, dtype="float32", device="cpu"), abs=1e-6
    )


def test_without_messages_the_text_is_scored_as_it_is_and_may_be_cut(scorer: str) -> None:
    full = by_model(PROMPT, "three", path=scorer, messages_key=None, dtype="float32", device="cpu")
    assert full == pytest.approx(expected(scorer, "user: one two\nthree"), abs=1e-6)
    short = by_model(
        PROMPT, "three", path=scorer, messages_key=None, max_tokens=4, dtype="float32", device="cpu"
    )
    assert short == pytest.approx(expected(scorer, "user: one two\nthree", first=4), abs=1e-6)


def test_a_model_without_a_score_head_is_refused(
    tokenizer: PreTrainedTokenizerBase, config: Qwen2Config, tmp_path: Path
) -> None:
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"has no score\.weight"):
        by_model(PROMPT, "three", path=str(tmp_path), device="cpu")


def test_a_row_without_messages_or_a_model_that_is_not_there_is_refused(
    scorer: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="a list of chat messages is expected"):
        by_model(PROMPT, "three", path=scorer, messages_key="text", dtype="float32", device="cpu")
    with pytest.raises(UsageError, match="no reward model can be loaded"):
        by_model(PROMPT, "three", path=str(tmp_path / "nowhere"), device="cpu")
    with pytest.raises(UsageError, match="dtype is 'int8'"):
        by_model(PROMPT, "three", path=scorer, dtype="int8")


def test_the_trainer_resolves_it_by_the_name_that_translations_write(scorer: str) -> None:
    resolve_reward(
        RewardConfig(
            function="temper_legacy_shim.old_reward_models:by_model", arguments={"path": scorer}
        )
    )
