"""A tiny model with its tokenizer to export, and a full disk."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from temper_engine_api.specs import ModelSpec

SPEC = ModelSpec(
    architecture={
        "model_type": "qwen2",
        "vocab_size": 16,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "use_cache": False,
    }
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


@contextmanager
def full_disk(*, at: int) -> Iterator[None]:
    """Limit the size of every file that this process writes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (at, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
