"""Weight sync on one machine without GPUs: shared memory and a gloo broadcast, beside a plain copy of the same bytes.

A set of bf16 weights of the given size, as a Qwen2 model has them, goes from a sender to one receiver in a process of its own, which copies
it into tensors that it holds. Wall time of the quickest of some sets, with and without checksums.

    OMP_NUM_THREADS=1 python bench/bench_weight_sync.py [--megabytes 512] [--repeats 3] [--json FILE]
"""

import argparse
import json
import multiprocessing
import platform
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from temper_engine_api.weights import NamedWeight, checksum
from temper_trainer.rollout.channel import Channel, ChannelSpec
from temper_trainer.rollout.parcels import Parcel, check_digest, cut, digest_of, fill, layout_of, named_weights, open_parcel, write_parcel

BUCKET_BYTES = 64 << 20


def make_weights(megabytes: int) -> list[NamedWeight]:
    """Layers of 1024 x 1024 projections until there are enough bytes."""
    count = max(1, megabytes * (1 << 20) // (2 << 20))
    return [NamedWeight(f"layers.{i}.weight", torch.randn(1024, 1024).to(torch.bfloat16)) for i in range(count)]


def keep(held: dict[str, Tensor], data: Tensor, parcel: Parcel) -> None:
    """What a server does with a bucket: copy it into its own tensors."""
    for name, tensor in named_weights(data, parcel):
        held.setdefault(name, torch.empty_like(tensor)).copy_(tensor)


def serve_files(pipe: "Connection[object, object]") -> None:
    """A receiver of sets in shared memory."""
    torch.set_num_threads(1)
    held: dict[str, Tensor] = {}
    while (parcels := pipe.recv()) is not None:
        assert isinstance(parcels, list)
        for parcel in parcels:
            data = open_parcel(parcel)
            check_digest(data, parcel)
            keep(held, data, parcel)
        pipe.send(len(held))


def serve_channel(spec: ChannelSpec, parcels: Sequence[Parcel], rounds: int) -> None:
    """A receiver of broadcasts."""
    torch.set_num_threads(1)
    channel = Channel(spec, rank=1, device=torch.device("cpu"))
    held: dict[str, Tensor] = {}
    for _ in range(rounds):
        for parcel in parcels:
            keep(held, channel.receive(parcel), parcel)


def best(call: Callable[[], object], repeats: int) -> float:
    """Seconds of the quickest call, after one that does not count."""
    call()
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return min(taken)


def measure_files(parts: list[list[NamedWeight]], *, with_digest: bool, repeats: int) -> float:
    """Write every bucket, let the receiver load all, remove them."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    receiver = context.Process(target=serve_files, args=(theirs,), daemon=True)
    receiver.start()
    root = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=root) as folder:

        def send() -> None:
            parcels = [write_parcel(part, Path(folder) / str(i), with_digest=with_digest) for i, part in enumerate(parts)]
            ours.send(parcels)
            ours.recv()
            for parcel in parcels:
                Path(str(parcel.path)).unlink()

        seconds = best(send, repeats)
    ours.send(None)
    receiver.join()
    return seconds


def measure_channel(parts: list[list[NamedWeight]], *, with_digest: bool, repeats: int) -> float:
    """Broadcast every bucket over gloo."""
    layouts = [layout_of(part) for part in parts]
    parcels = [Parcel(entries=entries, num_bytes=size, digest=None) for entries, size in layouts]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spec = ChannelSpec(
        backend="gloo", address="127.0.0.1", port=port, size=2, buffer_bytes=BUCKET_BYTES, with_digest=with_digest, timeout_s=120
    )
    context = multiprocessing.get_context("spawn")
    receiver = context.Process(target=serve_channel, args=(spec, parcels, repeats + 1), daemon=True)
    receiver.start()
    channel = Channel(spec, rank=0, device=torch.device("cpu"))

    def send() -> None:
        for part, parcel in zip(parts, parcels, strict=True):
            data = channel.buffer(parcel.num_bytes)
            fill(data, part, parcel.entries)
            channel.send(data)

    seconds = best(send, repeats)
    receiver.join()
    return seconds


def main() -> None:
    """Print a table, and write it where asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    weights = make_weights(chosen.megabytes)
    parts = list(cut(weights, bucket_bytes=BUCKET_BYTES))
    num_bytes = sum(weight.tensor.numel() * 2 for weight in weights)
    flat = torch.cat([weight.tensor.view(-1) for weight in weights]).view(torch.uint8)
    target = torch.empty_like(flat)
    found = {
        "plain copy in one process": best(lambda: target.copy_(flat), chosen.repeats),
        "checksum of parcels": best(lambda: digest_of(flat), chosen.repeats),
        "checksum SHA-256, as buckets in one process have": best(lambda: checksum([flat]), 1),
    }
    for with_digest in (True, False):
        suffix = "with checksum" if with_digest else "without checksum"
        found[f"shared memory, {suffix}"] = measure_files(parts, with_digest=with_digest, repeats=chosen.repeats)
        found[f"gloo broadcast, {suffix}"] = measure_channel(parts, with_digest=with_digest, repeats=chosen.repeats)
    machine = platform.processor() or platform.machine()
    print(f"{num_bytes / 1e6:.0f} MB of bf16 in buckets of {BUCKET_BYTES >> 20} MiB; {machine}, torch {torch.__version__}")
    print("| what | ms | GB/s |\n|---|---|---|")
    for name, seconds in found.items():
        print(f"| {name} | {seconds * 1e3:.1f} | {num_bytes / 1e9 / seconds:.2f} |")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps({"bytes": num_bytes, "seconds": found}, indent=1))


if __name__ == "__main__":
    main()
