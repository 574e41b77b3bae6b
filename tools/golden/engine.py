"""Write a checkpoint of a tiny model after two updates: `engine.py FOLDER MODULE:CLASS`.

Also writes the configuration and hashes of the checkpoint's contents. Runs with released sources
and therefore uses only the public interface of that version.
"""

import hashlib
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from temper_engine_api.batch import SequenceBatch, from_sequences
from temper_engine_api.engine import BaseEngine
from temper_engine_api.specs import ModelSpec, OptimizerSpec, PrecisionSpec

CONFIG: dict[str, dict[str, Any]] = {
    "model": {
        "architecture": {
            "model_type": "qwen2",
            "vocab_size": 31,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        },
        "seed": 3,
    },
    "optimizer": {"lr": 0.01, "clip_grad_norm": None, "weight_decay": 0.01},
    "precision": {"compute": "fp32"},
}
SEQUENCES = [[1, 5, 9, 2, 30], [7, 7, 4], [11, 3, 8, 29]]


def main(folder: Path, name: str) -> None:
    """Train, save a checkpoint, and record its contents."""
    module, _, attribute = name.partition(":")
    engine_class: type[BaseEngine] = getattr(import_module(module), attribute)
    settings: dict[str, Any] = {
        "model": ModelSpec(**CONFIG["model"]),
        "optimizer": OptimizerSpec(**CONFIG["optimizer"]),
        "precision": PrecisionSpec(**CONFIG["precision"]),
        "device": "cpu",
    }
    engine = engine_class(engine_class.config_class(**settings))
    engine.init_model()
    engine.set_loss_fn(
        lambda data, predictions, ctx: (-predictions["logprob"][data.loss_mask].mean(), ctx)
    )
    batch = from_sequences(
        [torch.tensor(sequence) for sequence in SEQUENCES],
        loss_masks=[torch.tensor([False] + [True] * (len(sequence) - 1)) for sequence in SEQUENCES],
    )
    for _ in range(2):
        _update(engine, batch)
    step = engine.save_checkpoint(str(folder / "checkpoints"), global_step=2)
    state = {
        entry.name: {
            "update_count": entry.update_count,
            **{
                column: _digest(getattr(entry, column))
                for column in ("master", "first_moment", "second_moment")
            },
        }
        for entry in engine.export_state()
    }
    written = {
        "config": CONFIG,
        "sequences": SEQUENCES,
        "step": Path(step).name,
        "state": state,
        "next_grad_norm": _update(engine, batch),
    }
    (folder / "written.json").write_text(json.dumps(written, indent=1) + "\n")
    engine.close()


def _update(engine: BaseEngine, batch: SequenceBatch) -> float:
    engine.optimizer_zero_grad()
    with engine.train_mode():
        engine.forward_backward_step(batch)
    return float(engine.optimizer_step())


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
