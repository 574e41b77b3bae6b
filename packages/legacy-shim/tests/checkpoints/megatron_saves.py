"""Checkpoints that Megatron itself writes on several ranks, in the layouts of the old managers.

Jobs for rank processes.

The moments are drawn, and two updates are counted. What each job returns is what the engine exports
of the same weights and its optimizer holds, under Hugging Face names.
"""

import multiprocessing
import queue
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from portable_state import read_training_state

from temper_engine_api.conformance.harness.measurements import Update, train
from temper_engine_api.conformance.harness.rank import EngineSetup, Rank
from temper_engine_api.conformance.inputs.batches import add_training_columns, make_ragged_batch
from temper_engine_api.weights import TrainingState

State = dict[str, TrainingState]


@contextmanager
def on_cpu() -> Iterator[None]:
    """Replace calls of Megatron's saves that require a device or start processes."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.cuda, "synchronize", lambda *_: None))
        stack.enter_context(patch.object(torch.cuda, "current_device", lambda: "cpu"))
        stack.enter_context(patch.object(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor))
        stack.enter_context(patch.object(filesystem_async, "_results_queue", queue.Queue()))
        stack.enter_context(patch.dict(multiprocessing.current_process()._config, daemon=False))  # type: ignore[attr-defined]
        yield


def drawn(engine: Any) -> State:
    """Give the engine's optimizer moments, as if two updates had been made.

    The same on every rank.
    """
    draw = torch.Generator().manual_seed(0)

    def some(tensor: torch.Tensor) -> torch.Tensor:
        return torch.rand(tensor.shape, generator=draw)

    expected = {
        state.name: replace(
            state, first_moment=some(state.master), second_moment=some(state.master), update_count=2
        )
        for state in engine.export_state()
    }
    engine.load_state(iter(expected.values()))
    return expected


def optimizer_of(engine: Any) -> Any:
    """Return Megatron's own, whose collectives on the host go over the groups that are there.

    On a CPU these are gloo's already.
    """
    chain = engine._built.optimizer._chain
    for each in chain.chained_optimizers:
        each.data_parallel_group_gloo = each.data_parallel_group
    return chain


def save_distributed(
    rank: Rank, *, setup: EngineSetup, folder: Path, sharding: str, with_weights: bool = True
) -> State:
    """Write ``dist_ckpt/`` as 0.4.1 to 0.8 did; without weights as they save with a bridge."""
    engine = rank.temporary_engine(setup)
    expected = drawn(engine)
    with on_cpu():
        write_distributed(
            list(engine._built.runner._chunks.unwrapped),
            optimizer_of(engine),
            folder=folder,
            sharding=sharding,
            with_weights=with_weights,
        )
    return expected if rank.index == 0 else {}


def write_distributed(
    chunks: list[Any], optimizer: Any, *, folder: Path, sharding: str, with_weights: bool
) -> None:
    """Write model and optimizer through Megatron's own dist_checkpointing."""
    from megatron.core import dist_checkpointing, mpu

    metadata = {
        "distrib_optim_sharding_type": sharding,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    model: dict[str, Any] = {}
    for number, chunk in enumerate(chunks):
        if len(chunks) > 1:
            mpu.set_virtual_pipeline_model_parallel_rank(number)
        of_model = {
            **metadata,
            "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
        }
        model["model" if len(chunks) == 1 else f"model{number}"] = chunk.sharded_state_dict(
            metadata=of_model
        )
    state = {"optimizer": optimizer.sharded_state_dict(model, metadata=metadata)}
    (folder / "dist_ckpt").mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(
        (model if with_weights else {})
        | state
        | {"lr_scheduler": {"num_steps": 1, "max_lr": 1e-2}},
        str(folder / "dist_ckpt"),
        content_metadata=metadata,
    )
    dist.barrier()


def save_ranks(
    rank: Rank, *, setup: EngineSetup, folder: Path, is_of_0_4: bool, all_experts: bool
) -> State:
    """Write ``model/mp_rank_*`` and ``optim/`` as 0.3 and 0.4.0 did.

    Only the first data-parallel rank wrote a model.

    Args:
        rank: this one.
        recipe: of the engine.
        folder: the role's.
        is_of_0_4: the names of optimizer files have the context- and data-parallel rank.
        all_experts: let every expert rank write its model, which those releases did only where
            experts are divided over tensor ranks.
    """
    from megatron.core import mpu

    engine = rank.temporary_engine(setup)
    expected = drawn(engine)
    tp, pp, dp, cp = (
        mpu.get_tensor_model_parallel_rank(),
        mpu.get_pipeline_model_parallel_rank(),
        mpu.get_data_parallel_rank(),
        mpu.get_context_parallel_rank(),
    )
    stage = f"_{pp:03d}" if mpu.get_pipeline_model_parallel_world_size() > 1 else ""
    expert = (
        f"_{mpu.get_expert_model_parallel_rank():03d}"
        if mpu.get_expert_model_parallel_world_size() > 1
        else ""
    )
    if dp == 0 or (all_experts and mpu.get_expert_data_parallel_rank() == 0):
        position = folder / f"model/mp_rank_{tp:02d}{stage}{expert}"
        position.mkdir(parents=True)
        torch.save(
            [chunk.state_dict() for chunk in engine._built.runner._chunks.unwrapped],
            position / "model.pt",
        )  # type: ignore[attr-defined]
    (folder / "optim").mkdir(parents=True, exist_ok=True)
    dist.barrier()
    name = f"distrib_optim_pp{pp}_tp{tp}{f'_cp{cp}_dp{dp}' if is_of_0_4 else ''}.pt"
    own = folder / "optim" / f"of_rank_{rank.index}"
    with on_cpu():
        optimizer_of(engine).save_parameter_state(str(own))
    for turn in range(
        dist.get_world_size()
    ):  # ranks that write one file do it one after the other, or it is damaged at random
        if turn == rank.index and own.exists():
            own.replace(folder / "optim" / name)
        dist.barrier()
    return expected if rank.index == 0 else {}


def next_update(rank: Rank, *, setup: EngineSetup, folder: Path | None) -> Update:
    """Compute the third update, of the first engine or of one that loads its checkpoint."""
    engine = rank.temporary_engine(setup)
    if folder is None:
        drawn(engine)
    else:
        engine.load_state(read_training_state(folder))
    bare = make_ragged_batch()
    bare = replace(bare, tokens=bare.tokens % 37)
    batch = add_training_columns(bare, logprobs=torch.full(bare.tokens.shape, -3.6))
    return train(engine, [batch])[0]


HOSTS = {"linear_qkv": False, "linear_proj": True, "linear_fc1": False, "linear_fc2": True}
"""Linear modules of every layer, and True if tensor ranks divide the input."""
RANK, ALPHA = 4, 8


def save_adapter(
    rank: Rank, *, setup: EngineSetup, folder: Path, sharding: str, is_private: bool
) -> None:
    """Write adapters of Megatron-Bridge's LoRA, in optimizer and checkpoint only.

    ``first`` holds what is converted, and ``again`` the same whole by parameter, for torch alone to
    read.

    Args:
        rank: this one.
        recipe: of the engine.
        folder: of both.
        sharding: of the optimizer in ``first``.
        is_private: as in 0.7 with a bridge: weights of adapters in ``adapter_checkpoint/``, and the
            optimizer alone in ``dist_ckpt/``.
    """
    engine: Any = rank.temporary_engine(
        replace(setup, optimizer=None)
    )  # also imports the bridge without TransformerEngine
    from temper_engine_megatron.runtime.cpu_device import support_missing_cuda

    chunks, settings = (
        list(engine._built.runner._chunks.unwrapped),
        engine._built.runner._chunks.transformer_config,
    )
    with support_missing_cuda():
        _adapt(chunks, settings, seed=7 + rank.index)
        optimizer = _updated(chunks, settings, seed=rank.index)
    with on_cpu():
        write_distributed(
            chunks,
            optimizer,
            folder=folder / "first",
            sharding=sharding,
            with_weights=not is_private,
        )
        write_distributed(
            chunks,
            optimizer,
            folder=folder / "again",
            sharding="fully_reshardable",
            with_weights=True,
        )
    if is_private:
        _write_private(chunks, folder / "first/adapter_checkpoint")


def _adapt(chunks: list[Any], settings: Any, *, seed: int) -> None:
    for chunk in chunks:
        chunk.requires_grad_(requires_grad=False)
        for layer in chunk.decoder.layers:
            for name in HOSTS:
                _wrap(
                    layer.self_attention if name in ("linear_qkv", "linear_proj") else layer.mlp,
                    name,
                    settings,
                )
    torch.manual_seed(seed)
    for parameter in (
        p for chunk in chunks for name, p in chunk.named_parameters() if ".adapter." in name
    ):
        torch.nn.init.normal_(parameter)


def _updated(chunks: list[Any], settings: Any, *, seed: int) -> Any:
    """Return Megatron's optimizer after two updates with drawn gradients."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    wrapped = [DistributedDataParallel(settings, ddp, chunk) for chunk in chunks]
    for each in wrapped:
        each.broadcast_params()
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
    )
    optimizer: Any = get_megatron_optimizer(config, wrapped, use_gloo_process_groups=False)
    for each in optimizer.chained_optimizers:
        each.data_parallel_group_gloo = each.data_parallel_group
    draw = torch.Generator().manual_seed(seed)
    for _ in range(2):
        for each in wrapped:
            for parameter in (p for p in each.parameters() if p.requires_grad):
                parameter.main_grad.copy_(torch.rand(parameter.shape, generator=draw))
            each.start_grad_sync()
            each.finish_grad_sync()
        optimizer.step()
    return optimizer


def _wrap(owner: Any, name: str, settings: Any) -> None:
    """Wrap as LoRA.transform does, which requires TransformerEngine at import.

    The adapter does not.
    """
    from megatron.bridge.peft.adapter_wrapper import AdapterWrapper
    from megatron.bridge.peft.utils import ParallelLinearAdapter

    base = getattr(owner, name)

    class Wrapped(AdapterWrapper):
        def forward(self, *_: object, **__: object) -> None:
            raise NotImplementedError

    adapter = ParallelLinearAdapter(
        base.input_size,
        base.output_size,
        RANK,
        base_linear_name=name,
        activation="identity",
        input_is_parallel=HOSTS[name],
        model_parallel_config=settings,
        alpha=ALPHA,
    )
    setattr(owner, name, Wrapped(base, adapter.to(settings.params_dtype)))


def _write_private(chunks: list[Any], folder: Path) -> None:
    """Write a file for each tensor rank and stage, of the first chunk only."""
    from megatron.core import mpu

    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    stage = (
        f"_{mpu.get_pipeline_model_parallel_rank():03d}"
        if mpu.get_pipeline_model_parallel_world_size() > 1
        else ""
    )
    if mpu.get_data_parallel_rank() == 0:
        state = {
            name.replace(".to_wrap.", "."): tensor
            for name, tensor in chunks[0].state_dict().items()
            if ".adapter." in name
        }
        path = folder / f"mp_rank_{mpu.get_tensor_model_parallel_rank():02d}{stage}_adapter.pt"
        torch.save({"adapter_state_dict": state}, path)
    dist.barrier()
