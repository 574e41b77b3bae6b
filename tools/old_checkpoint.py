"""Write checkpoints in the format of an older system, with FSDP2 on one rank.

    python -m tools.old_checkpoint FOLDER

They contain weights, moments and the schedule of step 100, as torch saves them. Pages about old
checkpoints ask their reader to have such a folder; their commands and programs run on this one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen2Config, Qwen2ForCausalLM

STEP = 100


def write_checkpoint(folder: Path) -> None:
    """Train a tiny model for one update and save it below a folder, which is created."""
    config = Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    model = Qwen2ForCausalLM(config)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1.0)
    tokens = torch.arange(24).reshape(2, 12)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    schedule.step()
    actor = folder / f"global_step_{STEP}" / "actor"
    config.save_pretrained(actor / "huggingface")
    extra = {"lr_scheduler": schedule.state_dict(), "rng": {}}
    for name, part in (
        ("model", model.state_dict()),
        ("optim", optimizer.state_dict()),
        ("extra_state", extra),
    ):
        torch.save(part, actor / f"{name}_world_size_1_rank_0.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text(str(STEP))
    dist.destroy_process_group()


if __name__ == "__main__":
    write_checkpoint(Path(sys.argv[1]))
