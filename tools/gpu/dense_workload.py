"""Batches and random weights on disk for RL updates at realistic sizes.

All contenders read the same weights and tokens, so that their first gradient norms can be compared.
"""

import json
import math
import random
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast

from temper_engine_api.batch import SequenceBatch, from_sequences
from temper_engine_api.weights import list_file_shapes
from tools.gpu.fsdp_workload import Scale
from tools.gpu.workload import CARDS

SHARD_BYTES = 4 << 30
"""Size limit of one safetensors file."""
TINY: Mapping[str, object] = {
    "vocab_size": 211,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
"""Sizes for a rehearsal on a CPU; the model type is that of the card."""
TINY_EXPERTS: Mapping[str, object] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
"""Further sizes of a mixture of experts."""
SHRINK_FACTOR = 128
"""Divisor of sequence lengths and micro-batches in a rehearsal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The sequences of one data-parallel rank in one update."""

    micro_batches: tuple[tuple[int, ...], ...]
    """Sequence lengths by micro-batch."""

    @property
    def max_tokens(self) -> int:
        """Number of tokens of the largest micro-batch."""
        return max(map(sum, self.micro_batches))

    @property
    def lengths(self) -> list[int]:
        """All sequence lengths."""
        return [length for micro in self.micro_batches for length in micro]

    def shrink(self) -> "Case":
        """Return the case at the size of a rehearsal."""
        return Case(
            micro_batches=tuple(
                tuple(max(4, length // SHRINK_FACTOR) for length in micro)
                for micro in self.micro_batches
            )
        )


def _log_normal(seed: int, *, num_micro_batches: int, max_tokens: int) -> Case:
    """Draw full micro-batches of log-normal lengths with median 3,000 and sigma 1."""
    draw = random.Random(seed)
    micro_batches = []
    for _ in range(num_micro_batches):
        sizes: list[int] = []
        while (left := max_tokens - sum(sizes)) > 0:
            sizes.append(min(left, max(128, round(draw.lognormvariate(math.log(3000), 1.0)))))
        micro_batches.append(tuple(sizes))
    return Case(micro_batches=tuple(micro_batches))


CASES: Mapping[str, Case] = {
    "4k": Case(micro_batches=((4096,) * 4,) * 4),
    "8k": Case(micro_batches=((8192,),) * 4),
    "8kx2": Case(micro_batches=((8192,) * 2,) * 2),
    "16k": Case(micro_batches=((16384,),) * 4),
    "64k": Case(micro_batches=((65536,),)),
}
"""Each case has 65,536 tokens per rank and update; `8k` and `8kx2` have 32,768."""


NUM_DRAWS = 5
"""Number of different updates of the case `mix`."""
MIX = tuple(
    _log_normal(seed, num_micro_batches=4, max_tokens=16384) for seed in range(1, 1 + NUM_DRAWS)
)
"""Updates with as many tokens as the other cases and different log-normal lengths."""


def get_architecture(model: str, scale: Scale) -> Mapping[str, object]:
    """Return the architecture of a model, or its tiny version for a rehearsal."""
    card = CARDS[model]
    if scale.device == "cuda":
        return card
    return {**card, **TINY, **(TINY_EXPERTS if "num_experts" in card else {})}


def get_shape(model: str, scale: Scale) -> dict[str, int]:
    """Return the integer fields of an architecture, from which its FLOPs are computed."""
    return {
        name: size for name, size in get_architecture(model, scale).items() if type(size) is int
    }


def get_cases(name: str, scale: Scale) -> list[Case]:
    """Return the updates of a case in order, shortened for a rehearsal."""
    cases = MIX if name == "mix" else (CASES[name],)
    return list(cases) if scale.device == "cuda" else [case.shrink() for case in cases]


def make_config(card: Mapping[str, object]) -> PretrainedConfig:
    """Return the transformers configuration of an architecture."""
    fields = dict(card)
    config: PretrainedConfig = AutoConfig.for_model(str(fields.pop("model_type")), **fields)
    return config


def write_weights(card: Mapping[str, object], folder: Path, *, device: str) -> None:
    """Write a Hugging Face directory with random bf16 weights unless it exists.

    Matrices are drawn with standard deviation 0.02; vectors (norms) are 1. Writes to a temporary
    folder and renames it, because several ranks may write at the same time.
    """
    if folder.is_dir():
        return
    config = make_config(card)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=folder.parent))
    config.architectures = [type(model).__name__]
    config.save_pretrained(part)
    generator = torch.Generator(device=device).manual_seed(0)
    shard: dict[str, torch.Tensor] = {}
    weight_map: dict[str, str] = {}
    shapes = [
        file_shape
        for name, parameter in model.named_parameters()
        for file_shape in list_file_shapes(name, parameter.shape)
    ]
    for i, (name, shape) in enumerate(shapes):
        tensor = torch.ones(tuple(shape), device=device, dtype=torch.bfloat16)
        if tensor.ndim > 1:
            tensor.normal_(std=0.02, generator=generator)
        shard[name] = tensor.cpu()
        is_full = sum(t.nbytes for t in shard.values()) >= SHARD_BYTES
        if is_full or i == len(shapes) - 1:
            file = f"model-{len(set(weight_map.values())):05}.safetensors"
            save_file(shard, part / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(shard, file)
            shard = {}
    index = {"metadata": {}, "weight_map": weight_map}
    (part / "model.safetensors.index.json").write_text(json.dumps(index))
    _tokenizer(config.vocab_size).save_pretrained(part)
    try:
        part.rename(folder)
    except OSError:  # another process was first
        shutil.rmtree(part)


def _tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Build the tokenizer that trainers require; the measurements do not use it."""
    words = {"<pad>": 0, "<eos>": 1, **{f"t{i}": i for i in range(2, min(vocabulary, 64))}}
    model = Tokenizer(WordLevel(words, unk_token="<pad>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def rl_batch(lengths: Sequence[int], *, vocabulary: int) -> SequenceBatch:
    """Return random tokens with the columns of a clipped policy gradient.

    All tokens except the first of each sequence are trained. All tokens of a sequence have the same
    advantage, and the old policy is uniform.
    """
    generator = torch.Generator().manual_seed(0)
    advantages = torch.randn(len(lengths), generator=generator).tolist()
    return from_sequences(
        [torch.randint(2, vocabulary, (n,), generator=generator) for n in lengths],
        loss_masks=[torch.arange(n) >= 1 for n in lengths],
        columns={
            "advantages": [torch.full((n,), a) for n, a in zip(lengths, advantages, strict=True)],
            "old_logprobs": [torch.full((n,), -math.log(vocabulary)) for n in lengths],
        },
    )
