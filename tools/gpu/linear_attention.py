r"""Compare linear attention by flash-linear-attention and by transformers' torch code on a GPU.

    python -m tools.gpu.linear_attention --out FOLDER

First, the conformance kit runs its families with linear attention on FSDPEngine with the kernels,
while its oracle computes on the CPU without them, in float32 and in bf16. Then updates of a
Qwen3.5 shape are timed with the kernels and without, each in its own process. Needs
flash-linear-attention and pytest. Version 0.6.0 refuses Triton 3.4 to 3.7.0 on Hopper GPUs unless
tilelang is installed. transformers calls its kernels wherever it can be imported, also on a CPU,
where they do not run.

Results are appended to FOLDER/rows.jsonl; FOLDER/kit-fp32.txt and kit-bf16.txt have the output of
the tests. Jobs in FOLDER/finished.jsonl are not repeated. `--rehearse` times a tiny model on a CPU
without the kernels.
"""

import argparse
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import torch

from temper_engine_api.specs import ModelSpec, OptimizerSpec, PrecisionSpec, Scalar
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_fsdp.engine import FSDPEngine
from tools.gpu.engine_fsdp import provide_entry_points
from tools.gpu.workload import ClippedPolicy, FinishedJobs, Rows, policy_batch, run_update

HIDE_KERNELS = "import sys; sys.modules['fla'] = None"
"""Makes transformers choose its torch code in this process."""
FAMILIES = "qwen3_next,qwen3_5_text,qwen3_5_moe_text"
NUM_WARM_UP, NUM_TIMED = 2, 5
SHAPE = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
}
"""Sizes of 0.8B; three of four layers have linear attention with 16 heads of 128."""
TINY_SHAPE = {**SHAPE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
TINY_LENGTHS = [[16], [4, 4]]
LENGTHS = [[16384], [8192, 8192], [4096] * 4, [2048] * 8]
"""Sequence lengths of the micro-batches."""


def run_kit(rows: Rows, out: Path, compute: str) -> bool:
    """Run the kit's families with linear attention; only the ranks of the engine have kernels."""
    arguments = [
        *("--pyargs", "temper_engine_api.conformance", "--engine", "fsdp", "--device", "cuda"),
        *("--groups", "family", "--families", FAMILIES, "--world-sizes", "1", "-q", "-rA"),
        *("--compute", compute, "-p", "no:cacheprovider"),
    ]
    program = f"{HIDE_KERNELS}; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    # Without it, Triton multiplies float32 matrices in TF32.
    environment = os.environ | ({"TRITON_F32_DEFAULT": "ieee"} if compute == "fp32" else {})
    start = time.perf_counter()
    result = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    (out / f"kit-{compute}.txt").write_text(result.stdout + result.stderr)
    rows.add(
        {
            "job": f"kit-{compute}",
            "ok": result.returncode == 0,
            "last": result.stdout.strip().splitlines()[-1:],
            "wall_s": round(time.perf_counter() - start, 1),
        }
    )
    return result.returncode == 0


def time_updates(rows: Rows, *, contender: str, rehearse: bool) -> None:
    """Time updates of a model with linear attention in this process and add a row."""
    device: Literal["cpu", "cuda"] = "cpu" if rehearse else "cuda"
    torch.manual_seed(0)
    architecture: dict[str, Scalar] = {"model_type": "qwen3_5_text", "tie_word_embeddings": True}
    engine = FSDPEngine(
        FSDPConfig(
            model=ModelSpec(architecture={**architecture, **(TINY_SHAPE if rehearse else SHAPE)}),
            optimizer=OptimizerSpec(lr=1e-6),
            precision=PrecisionSpec(compute="bf16"),
            activation_checkpointing=True,
            device=device,
        )
    )
    engine.init_model()
    engine.set_loss_fn(ClippedPolicy())
    lengths = TINY_LENGTHS if rehearse else LENGTHS
    batch = policy_batch(lengths, world_size=1)
    if not rehearse:
        torch.cuda.reset_peak_memory_stats()
    norms, seconds = [], []
    for _ in range(NUM_WARM_UP + NUM_TIMED):
        start = time.perf_counter()
        norms.append(run_update(engine, batch))
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[NUM_WARM_UP:])
    rows.add(
        {
            "job": f"update-{contender}",
            "ok": all(map(math.isfinite, norms)),
            "kernels": sys.modules.get("fla") is not None,
            "tokens_per_s": round(sum(map(sum, lengths)) / median),
            "seconds": [round(each, 3) for each in seconds],
            "norms": norms,
            "peak_gib": 0 if rehearse else round(torch.cuda.max_memory_allocated() / 2**30, 1),
        }
    )


def main() -> None:
    """Run the jobs that have not succeeded yet, each in its own process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--time", help="time updates in this process under this name")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = Rows(path=options.out / "rows.jsonl")
    if options.time:
        time_updates(rows, contender=options.time, rehearse=options.rehearse)
        return
    finished = FinishedJobs(path=options.out / "finished.jsonl")
    computes = () if options.rehearse else ("fp32", "bf16")
    contenders = ("torch",) if options.rehearse else ("kernels", "torch")
    with provide_entry_points():
        for compute in computes:
            if not finished.contain(f"kit-{compute}") and run_kit(rows, options.out, compute):
                finished.add(f"kit-{compute}")
        for contender in contenders:
            if not finished.contain(f"update-{contender}"):
                hide = f"{HIDE_KERNELS}; " if contender == "torch" else ""
                program = f"{hide}from tools.gpu.linear_attention import main; main()"
                own = ["--out", str(options.out), "--time", contender]
                own += ["--rehearse"] if options.rehearse else []
                subprocess.run([sys.executable, "-c", program, *own], check=True)
                finished.add(f"update-{contender}")


if __name__ == "__main__":
    main()
