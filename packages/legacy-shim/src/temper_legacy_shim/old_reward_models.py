"""Score completions with a reward model, as the old reward workers did.

The signature is that of the trainer's reward functions.

Translated configurations name ``by_model`` in ``reward.function``. The model is loaded once in each
process that scores, next to the roles, and scores one completion after the other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from temper_legacy_shim.errors import UsageError
from temper_legacy_shim.old_rewards import ScoredPrompt

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class _Loaded:
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    device: torch.device


def score_with_model(
    prompt: ScoredPrompt,
    text: str,
    /,
    *,
    path: str,
    messages_key: str | None = "prompt",
    max_tokens: int | None = None,
    dtype: str = "bfloat16",
    device: str | None = None,
) -> float:
    """Return the model's score after the last token of a conversation.

    Args:
        prompt: its messages are in ``extra``.
        text: the completion, which becomes the assistant's message.
        path: directory of a model with a score head of one label.
        messages_key: field of the row with the chat messages, which go through the model's own chat
            template; None scores the prompt's text with the completion behind it as they are, for a
            model that shares the policy's template.
        max_tokens: longer texts lose the end, as in the old code.
        dtype: bfloat16, float16 or float32.
        device: None takes a GPU if available.

    Raises:
        UsageError: no such model, one without a score head, or a row without messages.
    """
    loaded = _loaded(path, dtype, device)
    shown = _conversation(prompt, text, key=messages_key, tokenizer=loaded.tokenizer)
    ids: list[int] = loaded.tokenizer(shown, add_special_tokens=False)["input_ids"][:max_tokens]
    if not ids:
        raise UsageError(
            f"a conversation has no tokens for the reward model in {path}: nothing can be scored."
        )
    with torch.inference_mode():
        result = loaded.model(input_ids=torch.tensor([ids], device=loaded.device)).logits
    return float(result.float().reshape(-1)[0])


def _conversation(
    prompt: ScoredPrompt, text: str, *, key: str | None, tokenizer: PreTrainedTokenizerBase
) -> str:
    """Return the text to score: the prompt and its completion, or both in the chat template."""
    if key is None:
        return prompt.text + text
    messages = prompt.extra.get(key)
    if (
        not isinstance(messages, Sequence)
        or isinstance(messages, str)
        or not all(isinstance(each, Mapping) for each in messages)
    ):
        raise UsageError(
            f"the row has {messages!r:.60} under {key!r}, but a list of chat messages is expected: "
            "name their column in reward.arguments.messages_key and in data.train.extra_keys."
        )
    chat = [{"role": str(each["role"]), "content": str(each["content"])} for each in messages]
    shown = tokenizer.apply_chat_template(
        [*chat, {"role": "assistant", "content": text}], tokenize=False
    )
    return str(shown)


@cache
def _loaded(path: str, dtype: str, device: str | None) -> _Loaded:
    """Load a model and its tokenizer once in a process, without code from the checkpoint.

    A missing bias stays as it was made. A missing score head would give random scores.
    """
    if dtype not in _DTYPES:
        raise UsageError(
            f"reward.arguments.dtype is {dtype!r}, but must be one of {', '.join(_DTYPES)}."
        )
    position = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        model, notes = AutoModelForSequenceClassification.from_pretrained(
            path,
            num_labels=1,
            dtype=_DTYPES[dtype],
            output_loading_info=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError) as error:
        raise UsageError(f"no reward model can be loaded from {path!r}: {error}") from error
    absent = sorted(name for name in notes["missing_keys"] if not name.endswith(".bias"))
    if absent:
        raise UsageError(
            f"{path} has no {absent[0]}, which scores: it is no reward model; its scores would be "
            "random. Name one that is."
        )
    return _Loaded(model=model.to(position).eval(), tokenizer=tokenizer, device=position)


# `temper-train --check` calls rewards on one row, and loading the model would take too long.
score_with_model.call_in_check = False  # type: ignore[attr-defined]
# Translated configurations call it by this name.
by_model = score_with_model
