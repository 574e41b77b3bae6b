"""Print how much host memory an export of 256 MiB takes: python measure_export.py FOLDER."""

import resource
import sys
from collections.abc import Iterator

import torch

from temper_engine_api.weights import NamedWeight, WeightEntry
from temper_engine_fsdp.checkpoint import huggingface_files

SHAPE = (8, 1 << 20)  # 32 MiB of float32


def stream() -> Iterator[NamedWeight]:
    for i in range(8):
        yield NamedWeight(f"w{i}", torch.full(SHAPE, float(i)))


def main(folder: str) -> None:
    entries = [WeightEntry(name=f"w{i}", shape=SHAPE, dtype=torch.float32) for i in range(8)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    huggingface_files.write_weights(
        stream(), entries, directory=folder, is_writer=True, shard_bytes=128 << 20
    )
    sys.stdout.write(str((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024))


if __name__ == "__main__":
    main(sys.argv[1])
