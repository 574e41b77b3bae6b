"""Time weight sync on one host without GPUs: shared memory, a gloo broadcast and a plain copy.

    OMP_NUM_THREADS=1 python bench/bench_weight_sync.py [--megabytes 512] [--repeats 3]
        [--json FILE]

Sends bf16 weights of the given size to a receiver in another process, which copies them into its
own tensors. Reports the wall time of the fastest repeat, with and without checksums.

    OMP_NUM_THREADS=1 python bench/bench_weight_sync.py --changes 0.5B [--lr 1e-6 1e-5]
        [--repeats 3] [--json FILE]

With `--changes`, compares full weights with the elements that an update changed
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
from dataclasses import asdict, dataclass
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
from temper_trainer.weight_sync.collective_transport import (
    open_sender_channel,
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
MAX_SHARE = WeightSyncConfig().max_changed_fraction


def make_weights(megabytes: int) -> list[NamedWeight]:
    """Build 1024 x 1024 projections until their size is reached."""
    count = max(1, megabytes * (1 << 20) // (2 << 20))
    return [
        NamedWeight(f"layers.{i}.weight", torch.randn(1024, 1024).to(torch.bfloat16))
        for i in range(count)
    ]


def keep(held: dict[str, Tensor], data: Tensor, parcel: PackedBucket) -> None:
    """Copy a bucket into the receiver's tensors."""
    for name, tensor in unpack_tensors(data, parcel):
        held.setdefault(name, torch.empty_like(tensor)).copy_(tensor)


def serve_files(pipe: "Connection[object, object]") -> None:
    """Receive weights through files in shared memory."""
    torch.set_num_threads(1)
    held: dict[str, Tensor] = {}
    while (parcels := pipe.recv()) is not None:
        assert isinstance(parcels, list)
        for parcel in parcels:
            data = open_weight_file(parcel)
            check_digest(data, parcel)
            keep(held, data, parcel)
        pipe.send(len(held))


def serve_channel(spec: ChannelSpec, parcels: Sequence[PackedBucket], rounds: int) -> None:
    """Receive broadcast weights."""
    torch.set_num_threads(1)
    channel = WeightChannel(spec, rank=1, device=torch.device("cpu"))
    held: dict[str, Tensor] = {}
    for _ in range(rounds):
        for parcel in parcels:
            keep(held, channel.receive(parcel), parcel)


SHAPES = {"tiny": (128, 384, 4, 64, 64), "0.5B": (896, 4864, 24, 128, 151936)}
"""Hidden size, intermediate size, layers, key size and vocabulary; the head is tied."""


class Actor:
    """A single-rank actor with the attributes and methods that the transports use."""

    is_first = True

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


def keep_tensors(held: dict[str, Tensor], weights: Iterable[NamedWeight]) -> None:
    """Copy tensors into the receiver's tensors."""
    for name, tensor in weights:
        held.setdefault(name, torch.empty_like(tensor)).copy_(tensor)


def serve_shared(pipe: "Connection[object, object]") -> None:
    """Receive full weights and deltas from shared memory like a server; send back the seconds."""
    torch.set_num_threads(1)
    held: dict[str, Tensor] = {}
    while (message := pipe.recv()) is not None:
        begin = time.perf_counter()
        parcels, manifest = cast("tuple[list[PackedBucket], DeltaManifest | None]", message)
        for place, parcel in enumerate(parcels):
            data = open_weight_file(parcel)
            weights = list(unpack_tensors(data, parcel))
            if manifest is None:
                check_digest(data, parcel)
            else:
                changes, tensors = manifest.deltas[place], [weight.tensor for weight in weights]
                apply_delta(tensors, open_delta_file(changes), parcel.entries, changes.counts)
                check_updated_bucket(
                    tensors,
                    changes.updated_digest,
                    version=manifest.version,
                    base_version=manifest.base_version,
                )
            keep_tensors(held, weights)
        pipe.send(time.perf_counter() - begin)


def serve_changes(
    spec: ChannelSpec, layout: Sequence[PackedBucket], pipe: "Connection[object, object]"
) -> None:
    """Receive broadcast weights and deltas like a server; send a message after each copy."""
    torch.set_num_threads(1)
    channel = WeightChannel(spec, rank=1, device=torch.device("cpu"))
    held: dict[str, Tensor] = {}
    base: list[list[Tensor]] = []
    while (kind := pipe.recv()) is not None:
        arrived = []
        for place, parcel in enumerate(layout):
            if kind == "changes":
                changes, data = channel.receive_delta(parcel.entries)
                apply_delta(base[place], data, parcel.entries, changes.counts)
                check_updated_bucket(base[place], changes.updated_digest, version=1, base_version=0)
                arrived.append(base[place])
            else:
                own = channel.receive(parcel).clone()
                arrived.append([weight.tensor for weight in unpack_tensors(own, parcel)])
            keep_tensors(
                held,
                (
                    NamedWeight(entry.name, tensor)
                    for entry, tensor in zip(parcel.entries, arrived[-1], strict=True)
                ),
            )
        base = arrived
        pipe.send(len(held))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The fastest of several weight syncs."""

    seconds: float
    num_bytes: int
    """Size of the last sync."""
    fraction: float
    """Fraction of the elements that the last sync sent."""


def quickest(
    send: Callable[[int], SentWeights], actor: Actor, *, lr: float, repeats: int, first_version: int
) -> Measured:
    """Time syncs after one update each; the updates and the first sync are not counted."""
    taken = []
    for version in range(first_version, first_version + repeats + 1):
        actor.train(lr)
        begin = time.perf_counter()
        sent = send(version)
        taken.append(time.perf_counter() - begin)
    return Measured(seconds=min(taken[1:]), num_bytes=sent.num_bytes, fraction=sent.fraction)


def measure_shared_changes(
    actor: Actor, rates: Sequence[float], *, repeats: int
) -> dict[str, Measured]:
    """Time full weights and deltas through files in shared memory."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    receiver = context.Process(target=serve_shared, args=(theirs,), daemon=True)
    receiver.start()
    found = {}
    root = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=root) as directory:
        folder = Path(directory)

        def whole(version: int) -> SentWeights:
            parcels = write_weight_files(actor, str(folder / "whole"), BUCKET_BYTES, True)
            ours.send((parcels, None))
            ours.recv()
            return SentWeights(num_bytes=sum(parcel.num_bytes for parcel in parcels), fraction=1.0)

        found["shared memory, full"] = quickest(
            whole, actor, lr=rates[0], repeats=repeats, first_version=1
        )
        base = write_weight_files(actor, str(folder / "whole"), BUCKET_BYTES, True)
        loaded = [DeltaManifest(version=0, base_version=0, deltas=())]

        def changes(version: int) -> SentWeights:
            manifest = write_delta(
                actor,
                base,
                loaded[0],
                version,
                str(folder / str(version)),
                BUCKET_BYTES,
                True,
                MAX_SHARE,
            )
            ours.send((base, manifest))
            ours.recv()
            # The receiver has applied the new delta, so the files of the previous one can go.
            remove_folder(actor, str(folder / str(loaded[0].version)))
            # The next delta is relative to this one.
            loaded[0] = manifest
            pairs = list(zip(base, manifest.deltas, strict=True))
            elements = sum(
                count_sent_elements(parcel.entries, [FULL_TENSOR] * len(parcel.entries))
                for parcel in base
            )
            share = (
                sum(
                    count_sent_elements(parcel.entries, changed.counts) for parcel, changed in pairs
                )
                / elements
            )
            return SentWeights(
                num_bytes=sum(changed.num_bytes for _, changed in pairs), fraction=share
            )

        for number, lr in enumerate(rates, start=1):
            found[f"shared memory, delta, lr {lr:g}"] = quickest(
                changes, actor, lr=lr, repeats=repeats, first_version=100 * number
            )
    ours.send(None)
    receiver.join()
    return found


def measure_channel_changes(
    actor: Actor, rates: Sequence[float], *, repeats: int
) -> dict[str, Measured]:
    """Time full weights and deltas over gloo."""
    layout = plan_buckets(actor, BUCKET_BYTES)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    largest = max(parcel.num_bytes for parcel in layout)
    spec = ChannelSpec(
        backend="gloo",
        address="127.0.0.1",
        port=port,
        size=2,
        buffer_bytes=largest,
        with_digest=True,
        timeout_s=120,
    )
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    receiver = context.Process(target=serve_changes, args=(spec, layout, theirs), daemon=True)
    receiver.start()
    open_sender_channel(actor, spec)
    last = [0]

    def whole(version: int) -> SentWeights:
        ours.send("whole")
        sent = send_weights(actor, spec, layout, BUCKET_BYTES, "bench", version)
        ours.recv()
        last[0] = version
        return sent

    def changes(version: int) -> SentWeights:
        ours.send("changes")
        sent = send_delta(actor, spec, BUCKET_BYTES, "bench", last[0], version, MAX_SHARE)
        ours.recv()
        last[0] = version
        return sent

    found = {
        "gloo broadcast, full": quickest(
            whole, actor, lr=rates[0], repeats=repeats, first_version=1
        )
    }
    for number, lr in enumerate(rates, start=1):
        found[f"gloo broadcast, delta, lr {lr:g}"] = quickest(
            changes, actor, lr=lr, repeats=repeats, first_version=100 * number
        )
    ours.send(None)
    receiver.join()
    return found


def show_changes(
    shape: str, rates: Sequence[float], *, repeats: int, json_file: Path | None
) -> None:
    """Print a table of full weights and deltas, and write it to the JSON file."""
    actor = Actor(shape)
    found = measure_shared_changes(actor, rates, repeats=repeats) | measure_channel_changes(
        actor, rates, repeats=repeats
    )
    machine = platform.processor() or platform.machine()
    print(
        f"the {shape} shape in bf16, buckets of {BUCKET_BYTES >> 20} MiB; {machine}, torch {torch.__version__}"
    )
    print("| what | elements sent | MB | ms |\n|---|---|---|---|")
    for name, measured in found.items():
        print(
            f"| {name} | {measured.fraction:.2%} | {measured.num_bytes / 1e6:.3g} | {measured.seconds * 1e3:.1f} |"
        )
    if json_file is not None:
        json_file.write_text(
            json.dumps({name: asdict(measured) for name, measured in found.items()}, indent=1)
        )


def best(call: Callable[[], object], repeats: int) -> float:
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
    ours, theirs = context.Pipe()
    receiver = context.Process(target=serve_files, args=(theirs,), daemon=True)
    receiver.start()
    root = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=root) as folder:

        def send() -> None:
            parcels = [
                write_weight_file(part, Path(folder) / str(i), with_digest=with_digest)
                for i, part in enumerate(parts)
            ]
            ours.send(parcels)
            ours.recv()
            for parcel in parcels:
                Path(str(parcel.path)).unlink()

        seconds = best(send, repeats)
    ours.send(None)
    receiver.join()
    return seconds


def measure_channel(parts: list[list[NamedWeight]], *, with_digest: bool, repeats: int) -> float:
    """Time the broadcast of all buckets over gloo."""
    layouts = [plan_layout(part) for part in parts]
    parcels = [
        PackedBucket(entries=entries, num_bytes=size, digest=None) for entries, size in layouts
    ]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spec = ChannelSpec(
        backend="gloo",
        address="127.0.0.1",
        port=port,
        size=2,
        buffer_bytes=BUCKET_BYTES,
        with_digest=with_digest,
        timeout_s=120,
    )
    context = multiprocessing.get_context("spawn")
    receiver = context.Process(target=serve_channel, args=(spec, parcels, repeats + 1), daemon=True)
    receiver.start()
    channel = WeightChannel(spec, rank=0, device=torch.device("cpu"))

    def send() -> None:
        for part, parcel in zip(parts, parcels, strict=True):
            data = channel.bucket_buffer(parcel.num_bytes)
            pack_tensors(data, part, parcel.entries)
            channel.send(data)

    seconds = best(send, repeats)
    receiver.join()
    return seconds


def main() -> None:
    """Print the table, and write it to the JSON file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--changes", choices=SHAPES)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4])
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.changes is not None:
        show_changes(chosen.changes, chosen.lr, repeats=chosen.repeats, json_file=chosen.json)
        return
    weights = make_weights(chosen.megabytes)
    parts = list(split_into_buckets(weights, bucket_bytes=BUCKET_BYTES))
    num_bytes = sum(weight.tensor.numel() * 2 for weight in weights)
    flat = torch.cat([weight.tensor.view(-1) for weight in weights]).view(torch.uint8)
    target = torch.empty_like(flat)
    found = {
        "plain copy in one process": best(lambda: target.copy_(flat), chosen.repeats),
        "checksum of parcels": best(lambda: compute_digest(flat), chosen.repeats),
        "checksum SHA-256, as buckets in one process have": best(lambda: hash_tensors([flat]), 1),
    }
    for with_digest in (True, False):
        suffix = "with checksum" if with_digest else "without checksum"
        found[f"shared memory, {suffix}"] = measure_files(
            parts, with_digest=with_digest, repeats=chosen.repeats
        )
        found[f"gloo broadcast, {suffix}"] = measure_channel(
            parts, with_digest=with_digest, repeats=chosen.repeats
        )
    machine = platform.processor() or platform.machine()
    print(
        f"{num_bytes / 1e6:.0f} MB of bf16 in buckets of {BUCKET_BYTES >> 20} MiB; {machine}, torch {torch.__version__}"
    )
    print("| what | ms | GB/s |\n|---|---|---|")
    for name, seconds in found.items():
        print(f"| {name} | {seconds * 1e3:.1f} | {num_bytes / 1e9 / seconds:.2f} |")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps({"bytes": num_bytes, "seconds": found}, indent=1))


if __name__ == "__main__":
    main()
