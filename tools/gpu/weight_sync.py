r"""Time weight sync on CUDA without vLLM: shared memory, CUDA IPC, NCCL and a plain copy.

    PYTHONPATH=packages/engine-api/src:packages/trainer/src \
        python -m tools.gpu.weight_sync --out FOLDER [--shape 1.5B] [--jobs nccl_1]

A sender on the first GPU sends to receivers in other processes: with CUDA IPC on the same GPU, with
NCCL on each other GPU. A sync ends when every receiver has copied all tensors. Before anything is
timed, each receiver compares the checksum of the bytes of the first sync. Every transport is timed
with and without checksums. Rows are appended to FOLDER/rows.jsonl. A failed job adds a row with the
reason, the others still run, and the exit code is 1. Jobs in FOLDER/finished.jsonl are left out, so
the same command continues after an interruption. Needs only torch and blake3. Without CUDA, shared
memory and gloo run, to try the script.
"""

import argparse
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch
from torch import Tensor

from temper_engine_api.weights import NamedWeight
from temper_trainer.rollout.packed_bucket import (
    PackedBucket,
    check_digest,
    compute_digest,
    open_weight_file,
    pack_tensors,
    plan_layout,
    split_into_buckets,
    unpack_tensors,
    write_weight_file,
)
from temper_trainer.rollout.weight_channel import Backend, ChannelSpec, WeightChannel
from tools.gpu.workload import CARDS, SHAPES, FinishedJobs, Rows, find_free_port

BUCKET_BYTES = 512 << 20
REPEATS = 5
WAIT_S = 120.0
"""Timeout for a receiver."""
JOB_S = 180.0
"""Timeout for a job with all its processes."""
TINY: Mapping[str, int] = {
    "vocab_size": 1009,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def get_device(gpu: int) -> torch.device:
    """Return the GPU with this number, or the CPU without CUDA."""
    return torch.device("cuda", gpu) if torch.cuda.is_available() else torch.device("cpu")


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_weights(shape: str, *, device: torch.device) -> list[NamedWeight]:
    """Return bf16 tensors with the names and shapes of a Qwen2 model, or of a public model card."""
    card = CARDS.get(shape)
    sizes = TINY if shape == "tiny" else SHAPES.get(shape) or _select_integers(CARDS[shape])
    hidden, inner, layers = (
        sizes[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    head_dim = sizes.get("head_dim", hidden // sizes["num_attention_heads"])
    large = head_dim * sizes["num_attention_heads"]
    small = head_dim * sizes["num_key_value_heads"]
    embedding = (sizes["vocab_size"], hidden)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": (hidden,),
    }
    if card is not None and not card["tie_word_embeddings"]:
        shapes["lm_head.weight"] = embedding
    attention = {
        "q_proj": (large, hidden),
        "k_proj": (small, hidden),
        "v_proj": (small, hidden),
        "o_proj": (hidden, large),
    }
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    for i in range(layers):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.self_attn.{name}.weight": size for name, size in attention.items()}
        if card is None:
            biased = ("q_proj", "k_proj", "v_proj")
            shapes |= {f"{layer}.self_attn.{name}.bias": attention[name][:1] for name in biased}
        elif card["model_type"] == "qwen3":
            norms = ("q_norm", "k_norm")
            shapes |= {f"{layer}.self_attn.{name}.weight": (head_dim,) for name in norms}
        shapes |= {f"{layer}.mlp.{name}.weight": size for name, size in mlp.items()}
        norms = ("input_layernorm", "post_attention_layernorm")
        shapes |= {f"{layer}.{name}.weight": (hidden,) for name in norms}
    generator = torch.Generator(device=device).manual_seed(0)
    return [
        NamedWeight(
            name, torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)
        )
        for name, size in shapes.items()
    ]


def _select_integers(card: Mapping[str, object]) -> dict[str, int]:
    return {name: size for name, size in card.items() if type(size) is int}


def store_bucket(stored: dict[str, Tensor], data: Tensor, bucket: PackedBucket) -> None:
    """Copy a bucket into the receiver's tensors."""
    for name, tensor in unpack_tensors(data, bucket):
        stored.setdefault(name, torch.empty_like(tensor)).copy_(tensor)


def receive_all(
    rank: int,
    spec: ChannelSpec,
    buckets: list[PackedBucket],
    digests: list[int],
    gpu: int,
    barrier: Barrier,
) -> None:
    """Run the process of a receiver; it compares the checksums of the first sync."""
    device = get_device(gpu)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    channel = WeightChannel(replace(spec, rank=rank), device=device)
    stored: dict[str, Tensor] = {}
    for round_ in range(1 + REPEATS):
        for bucket, digest in zip(buckets, digests, strict=True):
            data = channel.receive(bucket)
            if round_ == 0 and compute_digest(data) != digest:
                raise SystemExit(
                    f"receiver {rank} got wrong bytes in the bucket that starts with "
                    f"{bucket.entries[0].name}"
                )
            store_bucket(stored, data, bucket)
        synchronize(device)
        barrier.wait(WAIT_S)
    barrier.wait(WAIT_S)
    channel.close()


def measure_channel(
    rows: Rows, shape: str, *, backend: Backend, gpus: list[int], with_digest: bool
) -> None:
    """Time one transport to receivers on the given GPUs."""
    device = get_device(0)
    parts = list(split_into_buckets(make_weights(shape, device=device), bucket_bytes=BUCKET_BYTES))
    buckets = [
        PackedBucket(entries=entries, num_bytes=size, digest=None)
        for entries, size in map(plan_layout, parts)
    ]
    port = find_free_port()
    spec = ChannelSpec(
        backend=backend,
        address="127.0.0.1",
        port=port,
        size=1 + len(gpus),
        buffer_bytes=max(bucket.num_bytes for bucket in buckets),
        with_digest=with_digest,
        timeout_s=WAIT_S,
    )
    digests = []
    for part, bucket in zip(parts, buckets, strict=True):
        data = torch.zeros(bucket.num_bytes, dtype=torch.uint8, device=device)
        pack_tensors(data, part, bucket.entries)
        digests.append(compute_digest(data))
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(1 + len(gpus))
    receivers = [
        context.Process(
            target=receive_all, args=(1 + i, spec, buckets, digests, gpu, barrier), daemon=True
        )
        for i, gpu in enumerate(gpus)
    ]
    for receiver in receivers:
        receiver.start()
    try:
        channel = WeightChannel(spec, device=device)

        def send() -> None:
            for part, bucket in zip(parts, buckets, strict=True):
                data = channel.get_bucket_buffer(bucket.num_bytes)
                data.zero_()  # The checksum includes the padding between tensors.
                pack_tensors(data, part, bucket.entries)
                channel.send(data)
            synchronize(device)
            barrier.wait(WAIT_S)

        send()
        seconds = measure_fastest(send, device=device)
        barrier.wait(WAIT_S)
        for receiver in receivers:
            receiver.join(WAIT_S)
        channel.close()
        codes = [receiver.exitcode for receiver in receivers]
        if any(codes):
            raise RuntimeError(f"receivers exited with {codes}, expected 0")
    finally:
        for receiver in receivers:
            receiver.terminate()
    num_bytes = sum(bucket.num_bytes for bucket in buckets)
    report(
        rows,
        backend,
        shape=shape,
        seconds=seconds,
        num_bytes=num_bytes,
        receivers=len(gpus),
        with_digest=with_digest,
    )


def measure_shared_memory(rows: Rows, shape: str, *, with_digest: bool) -> None:
    """Time a copy from the device to a mapped file in shared memory and back to the device."""
    device = get_device(0)
    weights = make_weights(shape, device=device)
    parts = list(split_into_buckets(weights, bucket_bytes=BUCKET_BYTES))
    stored: dict[str, Tensor] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        count = [0]

        def send() -> None:
            for part in parts:
                count[0] += 1
                bucket = write_weight_file(
                    part, Path(folder) / str(count[0]), with_digest=with_digest
                )
                data = open_weight_file(bucket)
                check_digest(data, bucket)
                for name, tensor in unpack_tensors(data, bucket):
                    stored.setdefault(name, torch.empty_like(tensor, device=device)).copy_(tensor)
                Path(str(bucket.path)).unlink()
            synchronize(device)

        send()
        if not all(torch.equal(stored[weight.name], weight.tensor) for weight in weights):
            raise RuntimeError("the weights that were read differ from those written")
        num_bytes = sum(weight.tensor.numel() * 2 for weight in weights)
        seconds = measure_fastest(send, device=device)
    report(
        rows,
        "shared_memory",
        shape=shape,
        seconds=seconds,
        num_bytes=num_bytes,
        receivers=1,
        with_digest=with_digest,
    )


def measure_copies(rows: Rows, shape: str) -> None:
    """Time copies on the device and to another GPU, and a checksum, to bound the transports."""
    device = get_device(0)
    num_bytes = (
        sum(weight.tensor.numel() * 2 for weight in make_weights(shape, device=device)) // 8 * 8
    )
    data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device)
    targets = {"copy_same_device": torch.empty_like(data)}
    if torch.cuda.device_count() > 1:
        targets["copy_other_gpu"] = torch.empty_like(data, device="cuda:1")
    for name, target in targets.items():
        seconds = measure_fastest(partial(_copy, data, target), device=device)
        report(
            rows,
            name,
            shape=shape,
            seconds=seconds,
            num_bytes=num_bytes,
            receivers=1,
            with_digest=False,
        )
        if not torch.equal(target.to(device), data):
            raise RuntimeError(f"{name} copied wrong bytes")
    seconds = measure_fastest(lambda: compute_digest(data), device=device)
    report(
        rows,
        "checksum",
        shape=shape,
        seconds=seconds,
        num_bytes=num_bytes,
        receivers=0,
        with_digest=True,
    )


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)
    synchronize(source.device)
    synchronize(target.device)


def measure_fastest(call: Callable[[], object], *, device: torch.device) -> float:
    """Return the seconds of the fastest of exactly `REPEATS` calls.

    The receivers expect this number of syncs.
    """
    taken = []
    for _ in range(REPEATS):
        synchronize(device)
        begin = time.perf_counter()
        call()
        synchronize(device)
        taken.append(time.perf_counter() - begin)
    return min(taken)


def report(
    rows: Rows,
    transport: str,
    *,
    shape: str,
    seconds: float,
    num_bytes: int,
    receivers: int,
    with_digest: bool,
) -> None:
    rows.add(
        {
            "transport": transport,
            "shape": shape,
            "receivers": receivers,
            "checksum": with_digest,
            "gbytes": round(num_bytes / 1e9, 3),
            "ms": round(seconds * 1e3, 2),
            "gbytes_per_s": round(num_bytes / 1e9 / seconds, 1),
        }
    )


def describe_machine(rows: Rows) -> None:
    """Add a row with the software versions and GPUs."""
    count = torch.cuda.device_count()
    row: dict[str, object] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpus": count,
    }
    if count:
        row |= {
            "gpu": torch.cuda.get_device_name(0),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    if count > 1:
        row["peer_access"] = torch.cuda.can_device_access_peer(0, 1)
    rows.add(row)


def list_jobs(rows: Rows, shape: str) -> dict[str, Callable[[], None]]:
    """Return the jobs that this number of GPUs allows, by name."""
    jobs: dict[str, Callable[[], None]] = {"copies": lambda: measure_copies(rows, shape)}
    channels: list[tuple[str, Backend, list[int]]] = [("gloo", "gloo", [0])]
    if torch.cuda.is_available():
        further = range(1, torch.cuda.device_count())
        channels = [
            ("cuda_ipc", "cuda_ipc", [0]),
            *((f"nccl_{gpu}", "nccl", list(range(1, gpu + 1))) for gpu in further),
        ]
    for with_digest in (True, False):
        suffix = "" if with_digest else "_unchecked"
        for name, backend, gpus in channels:
            jobs[name + suffix] = partial(
                measure_channel, rows, shape, backend=backend, gpus=gpus, with_digest=with_digest
            )
        jobs[f"shared_memory{suffix}"] = partial(
            measure_shared_memory, rows, shape, with_digest=with_digest
        )
    return jobs


def run_in_subprocess(rows: Rows, name: str, *, shape: str, folder: Path) -> bool:
    """Run a job in its own process, and return whether it succeeded.

    A hang or a broken device then does not affect the other jobs.
    """
    command = [
        sys.executable,
        "-m",
        "tools.gpu.weight_sync",
        "--out",
        str(folder),
        "--shape",
        shape,
        "--job",
        name,
    ]
    log = folder / f"{name}.log"
    with log.open("wb") as file:
        # A new session, so that a timeout kills the receivers too.
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | str = process.wait(JOB_S)
        except subprocess.TimeoutExpired:
            code = f"timed out after {JOB_S:.0f} s"
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = log.read_text(errors="replace").splitlines()
    if code == 0:
        print("\n".join(line for line in text if line.startswith("{")), flush=True)
    else:
        rows.add({"job": name, "failed": code, "log": text[-20:]})
    return code == 0


def main() -> None:
    """Run all jobs that this number of GPUs allows, or the chosen ones."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=["tiny", *SHAPES, *CARDS], default="1.5B")
    parser.add_argument("--jobs", help="comma-separated names; default: all")
    parser.add_argument("--job", help="run only this job, in this process")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    rows = Rows(path=chosen.out / "rows.jsonl")
    jobs = list_jobs(rows, chosen.shape)
    names = [chosen.job] if chosen.job else chosen.jobs.split(",") if chosen.jobs else list(jobs)
    if unknown := set(names) - set(jobs):
        parser.error(f"unknown jobs {sorted(unknown)}; expected {', '.join(jobs)}")
    if chosen.job:
        jobs[chosen.job]()
        return
    describe_machine(rows)
    finished = FinishedJobs(path=chosen.out / "finished.jsonl")
    waiting = [name for name in names if not finished.contain(name, chosen.shape)]
    failed = False
    for name in waiting:
        if run_in_subprocess(rows, name, shape=chosen.shape, folder=chosen.out):
            finished.add(name, chosen.shape)
        else:
            failed = True
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
