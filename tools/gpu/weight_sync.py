"""Weight sync on CUDA, without vLLM: how fast do buckets travel by shared memory, CUDA IPC and NCCL, beside a plain copy?

    PYTHONPATH=packages/engine-api/src:packages/trainer/src python -m tools.gpu.weight_sync --out FOLDER [--shape 1.5B] [--receivers 1]

A sender on GPU 0 and its receivers, one on each further GPU (for cuda_ipc and shared_memory with one GPU: on GPU 0 too), in processes of
their own. Every transport is timed with and without checksums; each receiver compares one set bit for bit first. Rows are appended to
FOLDER/rows.jsonl. Needs torch with CUDA alone.
"""

import argparse
import socket
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor

from temper_engine_api.weights import NamedWeight
from temper_trainer.rollout.channel import Backend, Channel, ChannelSpec
from temper_trainer.rollout.parcels import Parcel, check_digest, cut, digest_of, fill, layout_of, named_weights, open_parcel, write_parcel
from tools.gpu.workload import SHAPES, Rows

BUCKET_BYTES = 512 << 20
REPEATS = 5


def model_weights(shape: str, *, device: torch.device) -> list[NamedWeight]:
    """bf16 tensors with the names and shapes of a Qwen2 model."""
    sizes = SHAPES[shape]
    hidden, inner, layers = sizes["hidden_size"], sizes["intermediate_size"], sizes["num_hidden_layers"]
    small = hidden // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (sizes["vocab_size"], hidden)}
    for i in range(layers):
        layer = f"model.layers.{i}"
        attention = {"q_proj": (hidden, hidden), "k_proj": (small, hidden), "v_proj": (small, hidden), "o_proj": (hidden, hidden)}
        mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        shapes |= {f"{layer}.self_attn.{name}.weight": size for name, size in attention.items()}
        shapes |= {f"{layer}.mlp.{name}.weight": size for name, size in mlp.items()}
        shapes |= {f"{layer}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    generator = torch.Generator(device=device).manual_seed(0)
    return [NamedWeight(name, torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)) for name, size in shapes.items()]


def sizes_of(weights: list[NamedWeight]) -> tuple[list[list[NamedWeight]], list[Parcel], int]:
    """The buckets, what a receiver knows of them, and all bytes."""
    parts = list(cut(weights, bucket_bytes=BUCKET_BYTES))
    layouts = [layout_of(part) for part in parts]
    parcels = [Parcel(entries=entries, num_bytes=size, digest=None) for entries, size in layouts]
    return parts, parcels, sum(parcel.num_bytes for parcel in parcels)


def receive_all(rank: int, spec: ChannelSpec, parcels: list[Parcel], digest: int, gpu: int, rounds: int) -> None:
    """A receiver's process: the first set is compared bit for bit."""
    torch.cuda.set_device(gpu)
    device = torch.device("cuda", gpu)
    channel = Channel(spec, rank=rank, device=device)
    held: dict[str, Tensor] = {}
    for round_ in range(rounds):
        found = 0
        for parcel in parcels:
            data = channel.receive(parcel)
            for name, tensor in named_weights(data, parcel):
                held.setdefault(name, torch.empty_like(tensor)).copy_(tensor)
            if round_ == 0:
                found ^= digest_of(data)
        torch.cuda.synchronize()
        if round_ == 0:
            assert found == digest, f"receiver {rank} holds other bytes than were sent"
    channel.close()


def measure_channel(rows: Rows, shape: str, *, backend: Backend, gpus: list[int], with_digest: bool) -> None:
    """One transport to receivers on the given GPUs."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(0)
    weights = model_weights(shape, device=device)
    parts, parcels, num_bytes = sizes_of(weights)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spec = ChannelSpec(
        backend=backend, address="127.0.0.1", port=port, size=1 + len(gpus), buffer_bytes=BUCKET_BYTES, with_digest=with_digest
    )
    digest = 0
    for part, parcel in zip(parts, parcels, strict=True):
        data = torch.zeros(parcel.num_bytes, dtype=torch.uint8, device=device)
        fill(data, part, parcel.entries)
        digest ^= digest_of(data)
    context = multiprocessing.get_context("spawn")
    receivers = [context.Process(target=receive_all, args=(1 + i, spec, parcels, digest, gpu, 1 + REPEATS)) for i, gpu in enumerate(gpus)]
    for receiver in receivers:
        receiver.start()
    channel = Channel(spec, rank=0, device=device)

    def send() -> None:
        for part, parcel in zip(parts, parcels, strict=True):
            data = channel.buffer(parcel.num_bytes)
            data.zero_()
            fill(data, part, parcel.entries)
            channel.send(data)
        torch.cuda.synchronize()

    send()
    seconds = timed_min(send)
    for receiver in receivers:
        receiver.join(120)
        assert receiver.exitcode == 0, f"a receiver ended with {receiver.exitcode}"
    channel.close()
    report(rows, backend, shape=shape, seconds=seconds, num_bytes=num_bytes, receivers=len(gpus), with_digest=with_digest)


def measure_shared_memory(rows: Rows, shape: str, *, with_digest: bool) -> None:
    """Device to a file in shared memory, mapped, and back to the device."""
    device = torch.device("cuda", 0)
    weights = model_weights(shape, device=device)
    parts, _, num_bytes = sizes_of(weights)
    held = {weight.name: torch.empty_like(weight.tensor) for weight in weights}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        count = [0]

        def send() -> None:
            for part in parts:
                count[0] += 1
                parcel = write_parcel(part, Path(folder) / str(count[0]), with_digest=with_digest)
                data = open_parcel(parcel)
                check_digest(data, parcel)
                for name, tensor in named_weights(data, parcel):
                    held[name].copy_(tensor)
                Path(str(parcel.path)).unlink()
            torch.cuda.synchronize()

        send()
        assert all(torch.equal(held[weight.name], weight.tensor) for weight in weights)
        report(rows, "shared_memory", shape=shape, seconds=timed_min(send), num_bytes=num_bytes, receivers=1, with_digest=with_digest)


def measure_copies(rows: Rows, shape: str) -> None:
    """What the machine itself can do: copies on the device, to another one, and a checksum."""
    device = torch.device("cuda", 0)
    weights = model_weights(shape, device=device)
    _, _, num_bytes = sizes_of(weights)
    data = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    targets = {"copy_same_gpu": torch.empty_like(data)}
    if torch.cuda.device_count() > 1:
        targets["copy_other_gpu"] = torch.empty_like(data, device="cuda:1")
    for name, target in targets.items():
        seconds = timed_min(partial(_copy, data, target))
        report(rows, name, shape=shape, seconds=seconds, num_bytes=num_bytes, receivers=1, with_digest=False)
    report(rows, "checksum", shape=shape, seconds=timed_min(lambda: digest_of(data)), num_bytes=num_bytes, receivers=0, with_digest=True)


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)
    torch.cuda.synchronize(target.device)


def timed_min(call: Callable[[], object]) -> float:
    """Seconds of the quickest of some calls; exactly REPEATS are made."""
    taken = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return min(taken)


def report(rows: Rows, what: str, *, shape: str, seconds: float, num_bytes: int, receivers: int, with_digest: bool) -> None:
    """One row."""
    rows.add(
        {
            "transport": what,
            "shape": shape,
            "receivers": receivers,
            "checksum": with_digest,
            "gbytes": round(num_bytes / 1e9, 3),
            "ms": round(seconds * 1e3, 2),
            "gbytes_per_s": round(num_bytes / 1e9 / seconds, 1),
        }
    )


def main() -> None:
    """Measure everything that this machine's number of GPUs allows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", choices=list(SHAPES), default="1.5B")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    rows = Rows(path=chosen.out / "rows.jsonl")
    measure_copies(rows, chosen.shape)
    for with_digest in (True, False):
        measure_shared_memory(rows, chosen.shape, with_digest=with_digest)
        measure_channel(rows, chosen.shape, backend="cuda_ipc", gpus=[0], with_digest=with_digest)
        for count in (1, 3):
            if torch.cuda.device_count() > count:
                gpus = list(range(1, 1 + count))
                measure_channel(rows, chosen.shape, backend="nccl", gpus=gpus, with_digest=with_digest)


if __name__ == "__main__":
    main()
