"""Measure one row of `dense_models` in its own processes."""

import argparse
import fcntl
import itertools
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn.attention import activate_flash_attention_impl, register_flash_attention_impl
from torch.nn.attention._registry import FlashAttentionHandle

from temper_engine_api.batch import SequenceBatch
from temper_engine_api.engine import BaseEngine
from temper_engine_api.objective import HeadOutput
from temper_engine_api.specs import ModelSpec, OptimizerSpec
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.engine import FSDPEngine
from tools.gpu.dense_attention import measure_kernel_rates
from tools.gpu.dense_workload import (
    get_architecture,
    get_cases,
    get_shape,
    make_config,
    rl_batch,
    write_weights,
)
from tools.gpu.fsdp_timing import (
    RankContext,
    measure_gemm_rate,
    measure_times,
    profile_update,
    synchronize,
)
from tools.gpu.fsdp_workload import FULL, REHEARSAL, pack_local_batch
from tools.gpu.megatron_cases import LAYOUTS
from tools.gpu.plain_loop import PlainLoop
from tools.gpu.trl_update import grpo_update_seconds
from tools.gpu.workload import (
    PEAK_FLOPS,
    ClippedPolicy,
    Rows,
    find_free_port,
    flops_per_token_and_square,
    run_update,
    set_rank_variables,
)

NUM_WARM_UP, NUM_TIMED = 2, 3
ROOT = Path("/dev/shm/dense-weights")
"""Folder of the random weights, with one directory per model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The configuration that one row measures."""

    model: str
    case: str
    contender: str
    """`engine`, `plain`, `trl`, `megatron`, or `attention`, which times attention kernels."""
    layout: str = ""
    """Options of the contender, joined with `+`.

    Engines: `recompute`, `eager`, `chunked` (head), `reshard`, `ep` (`expert_parallel`), `cudnn`
    (`sdpa_varlen`), `fa4`, `rowwise` and `tensorwise` (float8),
    `te` (TransformerEngine's layers; with Megatron `tensorwise` and `blockwise` need it),
    `sequential` (Megatron's experts one after another), a Megatron layout such as `tp2-sp`;
    `profile`, `checkpoint` and `export` measure more. TRL: `kept` (no gradient checkpointing).
    All: `x2`, `x4` (GPUs).
    """

    @property
    def name(self) -> str:
        """Identifier such as `0.6B/16k/engine` or `8B/8k/megatron+tp2`."""
        return f"{self.model}/{self.case}/" + "+".join(filter(None, [self.contender, self.layout]))

    @property
    def options(self) -> frozenset[str]:
        """The set of single options."""
        return frozenset(filter(None, self.layout.split("+")))

    @classmethod
    def parse(cls, name: str) -> "Row":
        """Return the row of an identifier."""
        model, case, contender_and_options = name.split("/")
        contender, _, layout = contender_and_options.partition("+")
        return cls(model=model, case=case, contender=contender, layout=layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Timings and the first gradient norm of a contender."""

    seconds: list[float]
    lengths: list[int]
    """Sequence lengths of a rank over the timed updates."""
    first_norm: float
    """Gradient norm of the first update, equal among contenders with the same objective."""
    extra: Mapping[str, object]


def prepare_weights(row: Row, context: RankContext) -> Path:
    """Return the directory with the model's random weights, written by the first rank."""
    root = ROOT if context.scale.device == "cuda" else context.rows.path.parent / "weights"
    folder = root / row.model
    if context.is_first:
        write_weights(
            get_architecture(row.model, context.scale), folder, device=context.scale.device
        )
    if context.world_size > 1:
        dist.barrier()
    return folder


def make_batches(row: Row, context: RankContext, *, num_replicas: int) -> list[SequenceBatch]:
    """Return the mini-batches of the updates, for all data-parallel ranks."""
    vocabulary = get_shape(row.model, context.scale)["vocab_size"]
    cases = get_cases(row.case, context.scale)
    return [rl_batch(case.lengths * num_replicas, vocabulary=vocabulary) for case in cases]


def get_max_tokens(row: Row, context: RankContext) -> int:
    """Return the token limit of a micro-batch."""
    return get_cases(row.case, context.scale)[0].max_tokens


def measure(row: Row, context: RankContext, updates: Sequence[Callable[[], float]]) -> Measurement:
    """Time updates after warm-up; different updates take turns."""
    turn = itertools.cycle(range(len(updates)))
    cases = get_cases(row.case, context.scale)
    norms = [updates[next(turn)]() for _ in range(NUM_WARM_UP)]
    if context.scale.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    timed = [next(turn) for _ in range(NUM_TIMED)]
    seconds = [measure_times(context.scale, updates[i], repeats=1)[0] for i in timed]
    extra: Mapping[str, object] = {}
    if "profile" in row.options:
        extra = profile_update(context, updates[0], shape=row.model, contender=row.contender)
    return Measurement(
        seconds=seconds,
        lengths=[length for i in timed for length in cases[i].lengths],
        first_norm=norms[0],
        extra=extra,
    )


def make_fsdp_config(row: Row, context: RankContext, folder: Path) -> FSDPConfig:
    """Return the engine's fastest settings with the options of the row."""
    options = row.options
    on_cuda = context.scale.device == "cuda"
    return FSDPConfig(
        model=ModelSpec(path=str(folder)),
        optimizer=OptimizerSpec(lr=1e-6),
        device=context.scale.device,
        reshard_after_forward="reshard" in options,
        compile_layers=on_cuda and "eager" not in options,
        head_keeps_logits="chunked" not in options,
        activation_checkpointing="recompute" in options,
        attention="sdpa_varlen" if "cudnn" in options or not on_cuda else "auto",
        float8=next((r for r in ("rowwise", "tensorwise") if r in options), "none"),
        expert_parallel="ep" in options,
    )


def measure_fsdp(row: Row, context: RankContext) -> Measurement:
    """Measure FSDPEngine."""
    engine = FSDPEngine(make_fsdp_config(row, context, prepare_weights(row, context)))
    enable_flash_attention_4(row)
    return _measure_engine(row, context, engine, num_replicas=context.world_size)


def enable_flash_attention_4(row: Row) -> None:
    """Use FlashAttention 4 behind torch's operators if the row requests it."""
    if "fa4" in row.options:
        register_flash_attention_impl("FA4", register_fn=register_current_fa4)
        activate_flash_attention_impl("FA4")


def register_current_fa4() -> FlashAttentionHandle:
    """Register FlashAttention 4 with torch through an adapter for its newer versions."""
    from torch.nn.attention import _fa4

    # Torch 2.11 rejects the window (-1, 0), although its own causal attention calls with it.
    vars(_fa4)["_fa4_backward_support_error"] = lambda *_, **__: None
    return _fa4.register_flash_attention_fa4("tools.gpu.flash_attention_4")


def _measure_engine(
    row: Row,
    context: RankContext,
    engine: BaseEngine,
    *,
    num_replicas: int,
) -> Measurement:
    engine.init_model()
    engine.set_loss_fn(ClippedPolicy())
    max_tokens = get_max_tokens(row, context)
    batches = make_batches(row, context, num_replicas=num_replicas)
    packs = [engine.shard_data(batch, max_tokens=max_tokens) for batch in batches]
    updates = [partial(run_update, engine, pack, (HeadOutput.ENTROPY,)) for pack in packs]
    measurement = measure(row, context, updates)
    # In the log, the times of the updates survive a time limit that ends what follows.
    log(context, measurement)
    if "export" in row.options:
        measurement = replace(
            measurement, extra={**measurement.extra, **measure_export(context, engine)}
        )
    if "checkpoint" in row.options:
        measurement = replace(
            measurement, extra={**measurement.extra, **measure_checkpoint(context, engine)}
        )
    engine.close()
    return measurement


def measure_megatron(row: Row, context: RankContext) -> Measurement:
    """Measure MegatronEngine."""
    from temper_engine_megatron.config import MegatronConfig
    from temper_engine_megatron.engine import MegatronEngine

    layout = get_megatron_layout(row)
    config = MegatronConfig(
        model=ModelSpec(path=str(prepare_weights(row, context))),
        optimizer=OptimizerSpec(lr=1e-6),
        device=context.scale.device,
        compile_head=context.scale.compiles,
        recompute="layers" if "recompute" in row.options else "none",
        expert_products="sequential" if "sequential" in row.options else "auto",
        layers="transformer_engine" if "te" in row.options else "torch",
        float8=next((r for r in ("tensorwise", "blockwise") if r in row.options), "none"),
        **layout,  # type: ignore[arg-type]
    )
    num_replicas = context.world_size // config.replica_size
    return _measure_engine(row, context, MegatronEngine(config), num_replicas=num_replicas)


def get_megatron_layout(row: Row) -> dict[str, object]:
    """Return the parallel sizes that the row's options name."""
    return {k: v for option in row.options for k, v in LAYOUTS.get(option, {}).items()}


def get_replica_size(row: Row) -> int:
    """Return the number of ranks that process the same tokens in a Megatron row."""
    layout = get_megatron_layout(row)
    sizes = (layout.get(f"{axis}_parallel", 1) for axis in ("tensor", "pipeline"))
    return math.prod(int(str(size)) for size in sizes)


def measure_plain(row: Row, context: RankContext) -> Measurement:
    """Measure the plain loop, which computes only a cross-entropy."""
    scale = replace(context.scale, micro_batch_tokens=get_max_tokens(row, context))
    packs = [
        pack_local_batch(scale, batch, rank=context.rank, world_size=context.world_size)
        for batch in make_batches(row, context, num_replicas=context.world_size)
    ]
    loop = PlainLoop(
        make_config(get_architecture(row.model, scale)),
        device=scale.device,
        is_compiled=scale.compiles,
        recomputes="recompute" in row.options,
        reshards="reshard" in row.options,
    )
    return measure(row, context, [partial(loop.update, pack) for pack in packs])


def measure_trl(row: Row, context: RankContext) -> Measurement:
    """Measure TRL's GRPOTrainer."""
    # GRPO needs at least two completions per group. Cases with several updates repeat the first
    # timed one, because the prepared trainer has a single batch.
    cases = get_cases(row.case, context.scale)
    case = cases[NUM_WARM_UP % len(cases)]
    lengths = case.lengths * (2 if len(case.lengths) == 1 else 1)
    batch = rl_batch(lengths, vocabulary=get_shape(row.model, context.scale)["vocab_size"])
    is_equal = len(set(lengths)) == 1
    num_timed = 2
    seconds, norm = grpo_update_seconds(
        prepare_weights(row, context),
        batch,
        sequences_at_once=case.max_tokens // lengths[0] if is_equal else 1,
        device=context.scale.device,
        recomputes="kept" not in row.options,
        num_warm_up=1,
        num_timed=num_timed,
    )
    return Measurement(seconds=seconds, lengths=lengths * num_timed, first_norm=norm, extra={})


def measure_checkpoint(context: RankContext, engine: BaseEngine) -> dict[str, object]:
    """Time a save in the background, one in the foreground, and a load.

    The first checkpoint is deleted before the second is written, so that the file system needs room
    for one.
    """
    root = Path(tempfile.gettempdir(), f"dense-checkpoint-{os.environ['MASTER_PORT']}")
    row: dict[str, object] = {}
    for name in ("background", "foreground"):
        synchronize(context.scale)
        started = time.perf_counter()
        path = engine.save_checkpoint(
            str(root / name), global_step=1, in_background=name == "background"
        )
        stall_s = time.perf_counter() - started
        engine.finish_saving()
        row[f"{name}_stall_s"] = round(stall_s, 2)
        row[f"{name}_save_s"] = round(time.perf_counter() - started, 2)
        log(context, row)
        if name == "background":
            remove(context, root / name)
    started = time.perf_counter()
    engine.load_checkpoint(path)
    synchronize(context.scale)
    row["load_s"] = round(time.perf_counter() - started, 2)
    files = [file for file in Path(path).rglob("*") if file.is_file()]
    row["checkpoint_gbytes"] = round(sum(f.stat().st_size for f in files) / 1e9, 1)
    log(context, row)
    remove(context, root)
    return row


def log(context: RankContext, values: object) -> None:
    """Print values on the first rank."""
    if context.is_first:
        print(values, flush=True)


def remove(context: RankContext, folder: Path) -> None:
    """Delete a folder on the first rank, while the others wait."""
    if context.world_size > 1:
        dist.barrier()
    if context.is_first:
        shutil.rmtree(folder)
    if context.world_size > 1:
        dist.barrier()


def measure_export(context: RankContext, engine: BaseEngine) -> dict[str, object]:
    """Time the export of all weights in bf16, full tensors on every rank, without a receiver."""

    def export() -> int:
        with engine.export_weights() as weights:
            return sum(weight.tensor.nbytes for weight in weights)

    num_bytes = export()
    seconds = measure_times(context.scale, export, repeats=3)[1]
    return {"export_s": round(seconds, 3), "export_gbytes": round(num_bytes / 1e9, 2)}


def measure_attention(row: Row, context: RankContext) -> Measurement:
    """Time attention kernels in isolation over one causal sequence."""
    shape, length = get_shape(row.model, context.scale), get_max_tokens(row, context)
    enable_flash_attention_4(row)
    rates = measure_kernel_rates(shape, length=length, scale=context.scale)
    return Measurement(seconds=[1.0], lengths=[length], first_norm=0.0, extra=rates)


CONTENDERS: Mapping[str, Callable[[Row, RankContext], Measurement]] = {
    "engine": measure_fsdp,
    "megatron": measure_megatron,
    "plain": measure_plain,
    "trl": measure_trl,
    "attention": measure_attention,
}


def format_row(
    row: Row, context: RankContext, measurement: Measurement, *, gemm: float
) -> dict[str, object]:
    """Return the row of results of a contender."""
    shape = get_shape(row.model, context.scale)
    tokens = sum(measurement.lengths)
    per_token, per_square = flops_per_token_and_square(shape)
    flops_per_token = per_token + per_square * sum(n * n for n in measurement.lengths) / tokens
    tokens_per_s = tokens / sum(measurement.seconds)
    # Ranks of a replica process the same tokens, which count once.
    if "megatron" in row.name:
        tokens_per_s /= get_replica_size(row)
    rate = tokens_per_s * flops_per_token
    on_cuda = context.scale.device == "cuda"
    peak = torch.cuda.max_memory_allocated() if on_cuda else 0
    return {
        "job": "dense",
        "name": row.name,
        "gpus": context.world_size,
        "tokens_per_update": tokens // len(measurement.seconds),
        "tokens_per_s": round(tokens_per_s, 1),
        "gflop_per_token": round(flops_per_token / 1e9, 3),
        "tflops": round(rate / 1e12, 1),
        "mfu_of_gemm": round(rate / gemm, 3),
        "mfu_of_peak": round(rate / PEAK_FLOPS, 3),
        "gemm_tflops": round(gemm / 1e12),
        "seconds": [round(s, 4) for s in measurement.seconds],
        "peak_gib": round(peak / 2**30, 1),
        "first_norm": measurement.first_norm,
        "device": torch.cuda.get_device_name() if on_cuda else "cpu",
        "torch": torch.__version__,
        **measurement.extra,
        "ok": math.isfinite(measurement.first_norm),
    }


def rank_main(rank: int, world_size: int, port: int, path: str, name: str, rehearse: bool) -> None:
    """Measure one row on one rank."""
    set_rank_variables(rank, world_size=world_size, port=port)
    scale = REHEARSAL if rehearse else FULL
    row = Row.parse(name)
    if scale.device == "cuda":
        torch.cuda.set_device(rank)
    if row.contender not in ("trl", "attention"):  # TRL's accelerate creates its own process group.
        dist.init_process_group("cpu:gloo,cuda:nccl" if scale.device == "cuda" else "gloo")
    elif world_size == 1:
        for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(variable)
    context = RankContext(rows=Rows(path=Path(path)), rank=rank, world_size=world_size, scale=scale)
    begin = time.perf_counter()
    gemm = measure_gemm_rate(scale)
    measurement = CONTENDERS[row.contender](row, context)
    if context.is_first:
        wall_s = round(time.perf_counter() - begin, 1)
        context.rows.add({**format_row(row, context, measurement, gemm=gemm), "wall_s": wall_s})
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    """Measure the row named on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", help="such as 0.6B/16k/engine or 8B/8k/megatron+tp2")
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, at a tiny size")
    parser.add_argument("--lock", type=Path, help="file to lock before the GPU is used")
    options = parser.parse_args()
    if options.lock:
        # The lock is kept until the process ends, so that meanwhile the next row can import its
        # modules.
        descriptor = os.open(options.lock, os.O_CREAT | os.O_RDWR)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    port = find_free_port()
    arguments = (options.world_size, port, str(options.rows), options.name, options.rehearse)
    if options.world_size == 1:
        rank_main(0, *arguments)
    else:
        spawn(rank_main, args=arguments, nprocs=options.world_size)


if __name__ == "__main__":
    main()
