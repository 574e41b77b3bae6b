"""Optimizer files of FSDP1 as torch itself writes them, and those that can't be carried."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from old_files import write_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

from temper_legacy_shim.checkpoints import (
    Options,
    convert,
    find_roles,
    open_checkpoint,
    plan_jobs,
    rank_files,
)
from temper_legacy_shim.checkpoints.files.lazy import as_torch
from temper_legacy_shim.checkpoints.fsdp_moments import read_optimizer, read_trained_leaves
from temper_legacy_shim.checkpoints.model import Sources
from temper_legacy_shim.checkpoints.temper.training_state import resumable

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "tie_word_embeddings": False,
}


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(5, 7), nn.LayerNorm(3)


class _Model(nn.Module):
    """Sizes that no number of ranks divides; the weights of all are different numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.norm = (
            nn.Embedding(11, 3),
            nn.ModuleList([_Layer(), _Layer()]),
            nn.LayerNorm(5),
        )
        with torch.no_grad():
            for i, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) / 100 + i)


def _gradient(weight: Tensor) -> Tensor:
    return torch.sin(weight)


def _write_original_parameters(
    folder: Path, *, mesh_shape: tuple[int, ...], frozen: str = ""
) -> dict[str, Tensor]:
    """Run one FSDP1 update with use_orig_params, and return the weights before it.

    The gradient is a function of each weight.
    """
    tensors = {name: parameter.detach().clone() for name, parameter in _Model().named_parameters()}
    write_fsdp(folder, tensors, mesh_shape=mesh_shape)
    world = int(torch.tensor(mesh_shape).prod())
    for rank in range(world):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        try:
            mesh = init_device_mesh(
                "cpu", mesh_shape, mesh_dim_names=("ddp", "fsdp")[-len(mesh_shape) :]
            )
            strategy = "HYBRID_SHARD" if len(mesh_shape) == 2 else "FULL_SHARD"
            model = FullyShardedDataParallel(
                _Model(),
                device_mesh=mesh,
                use_orig_params=True,
                device_id=torch.device("cpu"),
                sharding_strategy=getattr(torch.distributed.fsdp.ShardingStrategy, strategy),
                auto_wrap_policy=ModuleWrapPolicy({_Layer}),
            )
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            for name, parameter in model.named_parameters():
                if parameter.numel() and not (
                    frozen and frozen in name
                ):  # FSDP gives no gradient to what lies on other ranks
                    parameter.grad = _gradient(parameter.detach())
            optimizer.step()
            torch.save(optimizer.state_dict(), folder / f"optim_world_size_{world}_rank_{rank}.pt")
        finally:
            dist.destroy_process_group()
    return tensors


@pytest.mark.filterwarnings("ignore:FSDP.state_dict_type")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed.fsdp")
@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (2, 2)])
def test_moments_of_original_parameters_are_put_together_from_the_ranks_stretches(
    tmp_path: Path, mesh_shape: tuple[int, ...]
) -> None:
    weights = _write_original_parameters(tmp_path, mesh_shape=mesh_shape, frozen="embed")
    (role,) = find_roles(tmp_path)
    read = rank_files.read_weights(role.fsdp_files["model"], where=tmp_path)
    result = read_optimizer(role, read, parameters=list(read))
    assert result.moments.keys() == weights.keys() - {"embed.weight"}
    for name, kept in result.moments.items():
        gradient = _gradient(weights[name])
        torch.testing.assert_close(as_torch(kept.first), 0.1 * gradient)
        torch.testing.assert_close(as_torch(kept.second), 0.001 * gradient**2)
        assert kept.update_count == 1
    trained = [name for name in read if name != "embed.weight"]
    of_leaves = read_trained_leaves(role, read, leaves=trained).moments
    assert all(
        torch.equal(as_torch(of_leaves[name].first), as_torch(kept.first))
        for name, kept in result.moments.items()
    )


def test_an_optimizer_next_to_an_exported_model_only_is_reported_not_to_be_carried(
    tmp_path: Path,
) -> None:
    # checkpoint.save_contents=[hf_model,optimizer,extra]: nothing says in which order the optimizer
    # numbered its parameters.
    from safetensors.torch import save_file

    actor = tmp_path / "global_step_2/actor"
    (actor / "huggingface").mkdir(parents=True)
    save_file({"model.norm.weight": torch.ones(4)}, actor / "huggingface/model.safetensors")
    (actor / "huggingface/config.json").write_text(json.dumps(CONFIG))
    state = {0: {"step": torch.tensor(2.0), "exp_avg": torch.ones(4), "exp_avg_sq": torch.ones(4)}}
    torch.save(
        {"state": state, "param_groups": [{"params": [0], "lr": 0.1}]},
        actor / "optim_world_size_1_rank_0.pt",
    )
    assert "in the order of model files" in resumable(open_checkpoint(actor)).not_carried[0]
    (job,) = plan_jobs(actor, tmp_path / "out")
    receipt = convert(job, Options(target="temper", checks_names=False), Sources())
    assert receipt.carried == ("weights, as float32 masters",)
