"""Time weight sync on one host without GPUs: shared memory, a gloo broadcast and a plain copy.

    OMP_NUM_THREADS=1 python bench/bench_weight_sync.py [--megabytes 512] [--repeats 3]
        [--json FILE]

Sends bf16 weights of the given size to a receiver in another process, which copies them into its
own tensors. Reports the wall time of the fastest repeat, with and without checksums.

    OMP_NUM_THREADS=1 python bench/bench_weight_sync.py --delta 0.5B [--lr 1e-6 1e-5]
        [--repeats 3] [--json FILE]

With `--delta`, compares full weights with the elements that an update changed
(`weight_sync.content=delta`). The master weights have a Qwen2's shapes and are drawn from
N(0, 0.02) in float32. An update moves every element up or down by the learning rate, as Adam's
first steps do; weights are exported in bf16.
"""

import argparse
import json
import multiprocessing
import platform
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from temper_engine_api.weights import NamedWeight, WeightStream, hash_tensors
from temper_trainer.config.rollout import WeightSyncConfig
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
from temper_trainer.rollout.weight_channel import ChannelSpec, WeightChannel
from temper_trainer.rollout.weight_delta import (
    FULL_TENSOR,
    DeltaManifest,
    apply_delta,
    check_updated_bucket,
    count_sent_elements,
    open_delta_file,
)
from temper_trainer.weight_sync.channel_sender import (
    open_sender_channel,
    open_store,
    plan_buckets,
    send_delta,
    send_weights,
)
from temper_trainer.weight_sync.shared_memory_transport import (
    remove_folder,
    write_delta,
    write_weight_files,
)
from temper_trainer.weight_sync.transport import SentWeights

BUCKET_BYTES = 64 << 20
MAX_CHANGED_FRACTION = WeightSyncConfig().max_changed_fraction


def make_weights(megabytes: int) -> list[NamedWeight]:
    """Build 1024 x 1024 projections until their size is reached."""
    count = max(1, megabytes * (1 << 20) // (2 << 20))
    return [
        NamedWeight(f"layers.{i}.weight", torch.randn(1024, 1024).to(torch.bfloat16))
        for i in range(count)
    ]


def store_bucket(stored: dict[str, Tensor], data: Tensor, bucket: PackedBucket) -> None:
    """Copy a bucket into the receiver's tensors."""
    for name, tensor in unpack_tensors(data, bucket):
        stored.setdefault(name, torch.empty_like(tensor)).copy_(tensor)


def serve_files(pipe: "Connection[object, object]") -> None:
    """Receive weights through files in shared memory."""
    torch.set_num_threads(1)
    stored: dict[str, Tensor] = {}
    while (buckets := pipe.recv()) is not None:
        assert isinstance(buckets, list)
        for bucket in buckets:
            data = open_weight_file(bucket)
            check_digest(data, bucket)
            store_bucket(stored, data, bucket)
        pipe.send(len(stored))


def make_gloo_spec(*, buffer_bytes: int, with_digest: bool) -> ChannelSpec:
    """Return a gloo channel from this process to one receiver, on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return ChannelSpec(
        backend="gloo",
        address="127.0.0.1",
        port=port,
        size=2,
        buffer_bytes=buffer_bytes,
        with_digest=with_digest,
        timeout_s=120,
    )


def serve_channel(spec: ChannelSpec, buckets: Sequence[PackedBucket], rounds: int) -> None:
    """Receive broadcast weights."""
    torch.set_num_threads(1)
    channel = WeightChannel(replace(spec, rank=1), device=torch.device("cpu"))
    stored: dict[str, Tensor] = {}
    for _ in range(rounds):
        for bucket in buckets:
            store_bucket(stored, channel.receive(bucket), bucket)


SHAPES = {"tiny": (128, 384, 4, 64, 64), "0.5B": (896, 4864, 24, 128, 151936)}
"""Hidden size, intermediate size, layers, key size and vocabulary; the head is tied."""


class Actor:
    """A single-rank actor with the attributes and methods that the transports use."""

    is_first, rank = True, 0

    def __init__(self, shape: str) -> None:
        self.transport_state: dict[str, object] = {}
        hidden, inner, layers, keys, vocabulary = SHAPES[shape]
        sizes = {"embed_tokens": (vocabulary, hidden), "norm": (hidden,)}
        for i in range(layers):
            layer = {
                "q": (hidden, hidden),
                "k": (keys, hidden),
                "v": (keys, hidden),
                "o": (hidden, hidden),
                "norm": (hidden,),
            }
            layer |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
            sizes |= {f"layers.{i}.{name}": size for name, size in layer.items()}
        generator = torch.Generator().manual_seed(0)
        self._masters = {
            f"{name}.weight": torch.randn(size, generator=generator) * 0.02
            for name, size in sizes.items()
        }
        self._generator = generator

    def train(self, lr: float) -> None:
        """Simulate an update that moves every element up or down by the learning rate."""
        for master in self._masters.values():
            signs = torch.randint(0, 2, master.shape, generator=self._generator, dtype=torch.int8)
            master.add_(signs, alpha=2 * lr).sub_(lr)

    def export_weights(self) -> WeightStream:
        """Export one tensor after another in bf16, as an engine does."""
        return WeightStream(
            NamedWeight(name, master.to(torch.bfloat16)) for name, master in self._masters.items()
        )


def store_tensors(stored: dict[str, Tensor], weights: Iterable[NamedWeight]) -> None:
    """Copy tensors into the receiver's tensors."""
    for name, tensor in weights:
        stored.setdefault(name, torch.empty_like(tensor)).copy_(tensor)


def serve_shared_deltas(pipe: "Connection[object, object]") -> None:
    """Receive full weights and deltas from shared memory like a server; send back the seconds."""
    torch.set_num_threads(1)
    stored: dict[str, Tensor] = {}
    while (message := pipe.recv()) is not None:
        begin = time.perf_counter()
        buckets, manifest = cast("tuple[list[PackedBucket], DeltaManifest | None]", message)
        for index, bucket in enumerate(buckets):
            data = open_weight_file(bucket)
            weights = list(unpack_tensors(data, bucket))
            if manifest is None:
                check_digest(data, bucket)
            else:
                delta, tensors = manifest.deltas[index], [weight.tensor for weight in weights]
                apply_delta(tensors, open_delta_file(delta), bucket.entries, delta.counts)
                check_updated_bucket(
                    tensors,
                    delta.updated_digest,
                    version=manifest.version,
                    base_version=manifest.base_version,
                )
            store_tensors(stored, weights)
        pipe.send(time.perf_counter() - begin)


def serve_deltas(
    spec: ChannelSpec, layout: Sequence[PackedBucket], pipe: "Connection[object, object]"
) -> None:
    """Receive broadcast weights and deltas like a server; send a message after each copy."""
    torch.set_num_threads(1)
    channel = WeightChannel(replace(spec, rank=1), device=torch.device("cpu"))
    stored: dict[str, Tensor] = {}
    base_tensors: list[list[Tensor]] = []
    while (kind := pipe.recv()) is not None:
        arrived = []
        for index, bucket in enumerate(layout):
            if kind == "delta":
                delta, data = channel.receive_delta(bucket.entries)
                apply_delta(base_tensors[index], data, bucket.entries, delta.counts)
                check_updated_bucket(
                    base_tensors[index], delta.updated_digest, version=1, base_version=0
                )
                arrived.append(base_tensors[index])
            else:
                data = channel.receive(bucket).clone()
                arrived.append([weight.tensor for weight in unpack_tensors(data, bucket)])
            store_tensors(
                stored,
                (
                    NamedWeight(entry.name, tensor)
                    for entry, tensor in zip(bucket.entries, arrived[-1], strict=True)
                ),
            )
        base_tensors = arrived
        pipe.send(len(stored))


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncCost:
    """The fastest of several weight syncs."""

    seconds: float
    num_bytes: int
    """Size of the last sync."""
    fraction: float
    """Fraction of the elements that the last sync sent."""


def measure_fastest(
    send: Callable[[int], SentWeights], actor: Actor, *, lr: float, repeats: int, first_version: int
) -> SyncCost:
    """Time syncs after one update each; the updates and the first sync are not counted."""
    taken = []
    for version in range(first_version, first_version + repeats + 1):
        actor.train(lr)
        begin = time.perf_counter()
        sent = send(version)
        taken.append(time.perf_counter() - begin)
    return SyncCost(seconds=min(taken[1:]), num_bytes=sent.num_bytes, fraction=sent.fraction)


def measure_shared_deltas(
    actor: Actor, rates: Sequence[float], *, repeats: int
) -> dict[str, SyncCost]:
    """Time full weights and deltas through files in shared memory."""
    context = multiprocessing.get_context("spawn")
    pipe, receiver_pipe = context.Pipe()
    receiver = context.Process(target=serve_shared_deltas, args=(receiver_pipe,), daemon=True)
    receiver.start()
    results = {}
    root = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=root) as directory:
        folder = Path(directory)

        def sync_full(version: int) -> SentWeights:
            buckets = write_weight_files(actor, str(folder / "full"), BUCKET_BYTES, True)
            pipe.send((buckets, None))
            pipe.recv()
            return SentWeights(num_bytes=sum(bucket.num_bytes for bucket in buckets), fraction=1.0)

        results["shared memory, full"] = measure_fastest(
            sync_full, actor, lr=rates[0], repeats=repeats, first_version=1
        )
        base = write_weight_files(actor, str(folder / "full"), BUCKET_BYTES, True)
        last_manifest = DeltaManifest(version=0, base_version=0, deltas=())

        def sync_delta(version: int) -> SentWeights:
            nonlocal last_manifest
            manifest = write_delta(
                actor,
                base,
                last_manifest,
                version,
                str(folder / str(version)),
                BUCKET_BYTES,
                True,
                MAX_CHANGED_FRACTION,
            )
            pipe.send((base, manifest))
            pipe.recv()
            # The receiver has applied the new delta, so the files of the previous one can go.
            remove_folder(actor, str(folder / str(last_manifest.version)))
            # The next delta is relative to this one.
            last_manifest = manifest
            pairs = list(zip(base, manifest.deltas, strict=True))
            elements = sum(
                count_sent_elements(bucket.entries, [FULL_TENSOR] * len(bucket.entries))
                for bucket in base
            )
            fraction = (
                sum(count_sent_elements(bucket.entries, delta.counts) for bucket, delta in pairs)
                / elements
            )
            return SentWeights(
                num_bytes=sum(delta.num_bytes for _, delta in pairs), fraction=fraction
            )

        for number, lr in enumerate(rates, start=1):
            results[f"shared memory, delta, lr {lr:g}"] = measure_fastest(
                sync_delta, actor, lr=lr, repeats=repeats, first_version=100 * number
            )
    pipe.send(None)
    receiver.join()
    return results


def measure_channel_deltas(
    actor: Actor, rates: Sequence[float], *, repeats: int
) -> dict[str, SyncCost]:
    """Time full weights and deltas over gloo."""
    layout = plan_buckets(actor, BUCKET_BYTES)
    largest = max(bucket.num_bytes for bucket in layout)
    # The transport opens the channel's store before it makes the spec.
    _, port, token = open_store(actor, "127.0.0.1")
    spec = replace(make_gloo_spec(buffer_bytes=largest, with_digest=True), port=port, token=token)
    context = multiprocessing.get_context("spawn")
    pipe, receiver_pipe = context.Pipe()
    receiver = context.Process(target=serve_deltas, args=(spec, layout, receiver_pipe), daemon=True)
    receiver.start()
    open_sender_channel(actor, {0: spec})
    last_version = 0

    def sync_full(version: int) -> SentWeights:
        nonlocal last_version
        pipe.send("full")
        sent = send_weights(actor, {0: spec}, layout, BUCKET_BYTES, "bench", version)
        pipe.recv()
        last_version = version
        return sent

    def sync_delta(version: int) -> SentWeights:
        nonlocal last_version
        pipe.send("delta")
        sent = send_delta(
            actor, {0: spec}, BUCKET_BYTES, "bench", last_version, version, MAX_CHANGED_FRACTION
        )
        pipe.recv()
        last_version = version
        return sent

    results = {
        "gloo broadcast, full": measure_fastest(
            sync_full, actor, lr=rates[0], repeats=repeats, first_version=1
        )
    }
    for number, lr in enumerate(rates, start=1):
        results[f"gloo broadcast, delta, lr {lr:g}"] = measure_fastest(
            sync_delta, actor, lr=lr, repeats=repeats, first_version=100 * number
        )
    pipe.send(None)
    receiver.join()
    return results


def compare_deltas(
    shape: str, rates: Sequence[float], *, repeats: int, json_file: Path | None
) -> None:
    """Print a table of full weights and deltas, and write it to the JSON file."""
    actor = Actor(shape)
    results = measure_shared_deltas(actor, rates, repeats=repeats) | measure_channel_deltas(
        actor, rates, repeats=repeats
    )
    machine = platform.processor() or platform.machine()
    print(
        f"the {shape} shape in bf16, buckets of {BUCKET_BYTES >> 20} MiB; {machine}, "
        f"torch {torch.__version__}"
    )
    print("| transport | elements sent | MB | ms |\n|---|---|---|---|")
    for name, cost in results.items():
        print(
            f"| {name} | {cost.fraction:.2%} | {cost.num_bytes / 1e6:.3g} "
            f"| {cost.seconds * 1e3:.1f} |"
        )
    if json_file is not None:
        json_file.write_text(
            json.dumps({name: asdict(cost) for name, cost in results.items()}, indent=1)
        )


def time_fastest(call: Callable[[], object], repeats: int) -> float:
    """Return the seconds of the fastest call, after one warm-up call."""
    call()
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return min(taken)


def measure_files(parts: list[list[NamedWeight]], *, with_digest: bool, repeats: int) -> float:
    """Time writing all buckets to files, loading them in the receiver, and removing them."""
    context = multiprocessing.get_context("spawn")
    pipe, receiver_pipe = context.Pipe()
    receiver = context.Process(target=serve_files, args=(receiver_pipe,), daemon=True)
    receiver.start()
    root = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=root) as folder:

        def send() -> None:
            buckets = [
                write_weight_file(part, Path(folder) / str(i), with_digest=with_digest)
                for i, part in enumerate(parts)
            ]
            pipe.send(buckets)
            pipe.recv()
            for bucket in buckets:
                Path(str(bucket.path)).unlink()

        seconds = time_fastest(send, repeats)
    pipe.send(None)
    receiver.join()
    return seconds


def measure_channel(parts: list[list[NamedWeight]], *, with_digest: bool, repeats: int) -> float:
    """Time the broadcast of all buckets over gloo."""
    layouts = [plan_layout(part) for part in parts]
    buckets = [
        PackedBucket(entries=entries, num_bytes=size, digest=None) for entries, size in layouts
    ]
    spec = make_gloo_spec(buffer_bytes=BUCKET_BYTES, with_digest=with_digest)
    context = multiprocessing.get_context("spawn")
    receiver = context.Process(target=serve_channel, args=(spec, buckets, repeats + 1), daemon=True)
    receiver.start()
    channel = WeightChannel(spec, device=torch.device("cpu"))

    def send() -> None:
        for part, bucket in zip(parts, buckets, strict=True):
            data = channel.get_bucket_buffer(bucket.num_bytes)
            pack_tensors(data, part, bucket.entries)
            channel.send(data)

    seconds = time_fastest(send, repeats)
    receiver.join()
    return seconds


def main() -> None:
    """Print the table, and write it to the JSON file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--delta", choices=SHAPES, help="compare full weights and deltas of this model shape"
    )
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4])
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.delta is not None:
        compare_deltas(chosen.delta, chosen.lr, repeats=chosen.repeats, json_file=chosen.json)
        return
    weights = make_weights(chosen.megabytes)
    parts = list(split_into_buckets(weights, bucket_bytes=BUCKET_BYTES))
    num_bytes = sum(weight.tensor.numel() * 2 for weight in weights)
    flat = torch.cat([weight.tensor.view(-1) for weight in weights]).view(torch.uint8)
    target = torch.empty_like(flat)
    results = {
        "plain copy in one process": time_fastest(lambda: target.copy_(flat), chosen.repeats),
        "checksum of buckets": time_fastest(lambda: compute_digest(flat), chosen.repeats),
        "BLAKE3, the checksum of weights within one process": time_fastest(
            lambda: hash_tensors([flat]), chosen.repeats
        ),
    }
    for with_digest in (True, False):
        suffix = "with checksum" if with_digest else "without checksum"
        results[f"shared memory, {suffix}"] = measure_files(
            parts, with_digest=with_digest, repeats=chosen.repeats
        )
        results[f"gloo broadcast, {suffix}"] = measure_channel(
            parts, with_digest=with_digest, repeats=chosen.repeats
        )
    machine = platform.processor() or platform.machine()
    print(
        f"{num_bytes / 1e6:.0f} MB of bf16 in buckets of {BUCKET_BYTES >> 20} MiB; {machine}, "
        f"torch {torch.__version__}"
    )
    print("| operation | ms | GB/s |\n|---|---|---|")
    for name, seconds in results.items():
        print(f"| {name} | {seconds * 1e3:.1f} | {num_bytes / 1e9 / seconds:.2f} |")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps({"bytes": num_bytes, "seconds": results}, indent=1))


if __name__ == "__main__":
    main()
