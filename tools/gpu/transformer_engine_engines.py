"""MegatronEngine with TransformerEngine's layers as its default, for the conformance kit.

    python -m temper_engine_api.conformance \
        --engine tools.gpu.transformer_engine_engines:TransformerEngineEngine \
        --device cuda --compute bf16 --world-sizes 1
    python -m tools.gpu.transformer_engine_engines --layouts tp2,pp2 --gpus 0,1 --out FOLDER

The second command runs the kit in Megatron's layouts, and continues in the same folder.

`TensorwiseEngine` and `BlockwiseEngine` multiply in float8 as well. Tests that configure float32
fail, because these layers refuse it, and with float8 so do tests that configure an adapter.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from temper_engine_api.specs import EngineConfig
from temper_engine_megatron.config import Float8Scaling, MegatronConfig
from temper_engine_megatron.engine import MegatronEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerEngineConfig(MegatronConfig):
    """MegatronConfig with another default."""

    layers: Literal["torch", "transformer_engine"] = "transformer_engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorwiseConfig(TransformerEngineConfig):
    """MegatronConfig with other defaults."""

    float8: Float8Scaling = "tensorwise"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockwiseConfig(TransformerEngineConfig):
    """MegatronConfig with other defaults."""

    float8: Float8Scaling = "blockwise"


class TransformerEngineEngine(MegatronEngine):
    """MegatronEngine with TransformerEngine's layers unless it is told otherwise."""

    config_class: ClassVar[type[EngineConfig]] = TransformerEngineConfig


class TensorwiseEngine(MegatronEngine):
    """MegatronEngine that multiplies in float8, with one scale per tensor."""

    config_class: ClassVar[type[EngineConfig]] = TensorwiseConfig


class BlockwiseEngine(MegatronEngine):
    """MegatronEngine that multiplies in float8, with scales per block."""

    config_class: ClassVar[type[EngineConfig]] = BlockwiseConfig


ENGINES = {
    "transformer-engine": (TransformerEngineEngine, TransformerEngineConfig),
    "te-tensorwise": (TensorwiseEngine, TensorwiseConfig),
    "te-blockwise": (BlockwiseEngine, BlockwiseConfig),
}
"""Engines and their configs by the name of their entry points."""


def write_metadata(folder: Path) -> None:
    """Write the metadata of a package with these engines to a folder for PYTHONPATH."""
    metadata = folder / "temper_transformer_engine_engines-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: temper-transformer-engine-engines\nVersion: 0\n"
    )
    module = "tools.gpu.transformer_engine_engines"
    lines = ["[temper.engines]"]
    lines += [f"{name} = {module}:{engine.__name__}" for name, (engine, _) in ENGINES.items()]
    lines += ["[temper.engine_configs]"]
    lines += [f"{name} = {module}:{config.__name__}" for name, (_, config) in ENGINES.items()]
    lines += ["[temper.conformance_layouts]"]
    lines += [f"{name} = temper_engine_megatron.layouts:LAYOUTS" for name in ENGINES]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")


def main() -> int:
    """Run `tools.conformance_report` on an engine in bf16."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=ENGINES, default="transformer-engine")
    parser.add_argument("--layouts", required=True, help="Megatron's, such as tp2,pp2")
    parser.add_argument("--gpus", required=True, help="GPUs to use, such as 0,1")
    parser.add_argument("--ranks-at-once", default="16")
    parser.add_argument("--limit", default="540", help="time limit in seconds")
    parser.add_argument("--out", required=True, help="folder for the results")
    chosen = parser.parse_args()
    only = ",".join(f"{chosen.engine}:{layout}" for layout in chosen.layouts.split(","))
    command = [sys.executable, "-m", "tools.conformance_report", "--compute", "bf16"]
    command += ["--engines", chosen.engine, "--only", only, "--gpus", chosen.gpus, "--resume"]
    command += ["--ranks-at-once", chosen.ranks_at_once, "--limit", chosen.limit]
    command += ["--out", chosen.out]
    with tempfile.TemporaryDirectory(prefix="entry-points-") as folder:
        write_metadata(Path(folder))
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        return subprocess.run(
            command, env=os.environ | {"PYTHONPATH": path}, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
