"""Kills ranks while they save, and says what the last complete step then holds: python saving_ranks.py FOLDER foreground|background SEED...

They save with split matrices and load as stages. Processes fork from one that has everything imported, so that a trial takes seconds. One
line of JSON for each seed.
"""

import hashlib
import json
import multiprocessing
import random
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import torch
import torch.distributed as dist

from temper_engine_api.batch import from_sequences
from temper_engine_api.checkpoint import list_complete_steps
from temper_engine_api.checkpoint.step_directories import list_partial_saves
from temper_engine_api.specs import ModelSpec, OptimizerSpec, PrecisionSpec, Scalar
from temper_engine_megatron.config import MegatronConfig
from temper_engine_megatron.engine import MegatronEngine

WORLD_SIZE = 2
# About a megabyte with its moments: large enough that writing takes a while, small enough that starting does not.
ARCHITECTURE: Mapping[str, Scalar] = {
    "model_type": "qwen2",
    "vocab_size": 499,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Of one rank."""

    rank: int
    world_size: int
    rendezvous: str
    """Path of the file through which the ranks meet."""
    folder: Path
    """Of the step directories; digests lie beside them."""
    in_background: bool
    """How it saves."""
    tensor_parallel: int
    """1 or both ranks; stages where it is 1."""


def started(job: Job) -> MegatronEngine:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{job.rendezvous}", rank=job.rank, world_size=job.world_size
    )
    engine = MegatronEngine(
        MegatronConfig(
            model=ModelSpec(architecture=ARCHITECTURE),
            optimizer=OptimizerSpec(lr=1e-2),
            precision=PrecisionSpec(compute="fp32"),
            device="cpu",
            tensor_parallel=job.tensor_parallel,
            pipeline_parallel=job.world_size // job.tensor_parallel,
        )
    )
    engine.init_model()
    engine.set_loss_fn(
        lambda data, predictions, ctx: (-predictions["logprob"][data.loss_mask].mean(), ctx)
    )
    return engine


def update(engine: MegatronEngine, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    tokens = [torch.randint(0, 499, (length,), generator=generator) for length in (7, 12)]
    batch = from_sequences(tokens, loss_masks=[torch.arange(len(t)) >= 1 for t in tokens])
    engine.optimizer_zero_grad()
    with engine.train_mode():
        engine.forward_backward_step(batch)
    engine.optimizer_step()


def digest_of(engine: MegatronEngine) -> str:
    digest = hashlib.sha256()
    for entry in engine.export_state():
        for tensor in (entry.master, entry.first_moment, entry.second_moment):
            digest.update(tensor.numpy().tobytes())
        digest.update(str(entry.update_count).encode())
    return digest.hexdigest()


def save_without_end(job: Job, connection: Connection) -> None:
    """Sends how many seconds the first save took, and then a word before each of the others."""
    engine = started(job)
    for step in range(1, 10_000):
        update(engine, step)
        digest = digest_of(engine)
        if job.rank == 0:
            (job.folder / f"digest-{step}").write_text(digest)
        if step > 1:
            connection.send((step, ""))
        begun = time.monotonic()
        engine.save_checkpoint(
            str(job.folder),
            global_step=step,
            max_ckpt_to_keep=2,
            in_background=job.in_background and step > 1,
        )
        if step == 1:
            connection.send((1, str(time.monotonic() - begun)))


def load_and_report(job: Job, connection: Connection) -> None:
    """Sends (updates, digest) of the last complete step, after one more update."""
    engine = started(job)
    engine.load_checkpoint(str(job.folder))
    found = (engine.num_updates, digest_of(engine))
    update(engine, found[0] + 1)
    connection.send(found)
    engine.close()
    dist.destroy_process_group()
    assert threading.active_count() == 1


def start(
    context: ForkServerContext, target: Callable[[Job, Connection], None], job: Job
) -> tuple[list[ForkServerProcess], list[Connection]]:
    processes, ends = [], []
    for rank in range(WORLD_SIZE):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=target, args=(replace(job, rank=rank), theirs), daemon=True
        )
        process.start()
        theirs.close()
        processes.append(process)
        ends.append(ours)
    return processes, ends


def answers(ends: list[Connection]) -> list[tuple[int, str]]:
    for end in ends:
        assert end.poll(120), "a rank said nothing for two minutes"
    return [end.recv() for end in ends]


def kill_once(
    context: ForkServerContext, folder: Path, *, seed: int, in_background: bool
) -> dict[str, object]:
    """What was found after a kill."""
    folder.mkdir(parents=True)
    draw = random.Random(f"kill {seed}")
    job = Job(
        rank=0,
        world_size=WORLD_SIZE,
        rendezvous=str(folder / "meet-1"),
        folder=folder,
        in_background=in_background,
        tensor_parallel=2,
    )
    processes, ends = start(context, save_without_end, job)
    took_s = float(answers(ends)[0][1])
    for _ in range(draw.randint(1, 3)):
        answers(ends)
    time.sleep(draw.uniform(0.0, 1.2 * took_s))
    before = list_complete_steps(folder)[-1]
    processes[draw.randrange(WORLD_SIZE)].kill()
    time.sleep(draw.choice([0.0, 0.3]))  # the other one goes on for a while, or dies with it
    for process in processes:
        process.kill()
        process.join()
    was_saving = bool(list_partial_saves(folder))
    processes, ends = start(
        context, load_and_report, replace(job, rendezvous=str(folder / "meet-2"), tensor_parallel=1)
    )
    found = answers(ends)
    for process in processes:
        process.join(60)
    return {
        "seed": seed,
        "was_saving": was_saving,
        "before": before,
        "complete": list_complete_steps(folder),
        "loaded": [step for step, _ in found],
        "digests": [digest for _, digest in found],
        "saved_digest": (folder / f"digest-{found[0][0]}").read_text(),
        "exit_codes": [process.exitcode for process in processes],
    }


def main(folder: Path, in_background: bool, seeds: list[int]) -> None:
    context = multiprocessing.get_context("forkserver")
    # "__main__" is not preloaded by Python 3.11, so what it imports is named.
    context.set_forkserver_preload(
        ["temper_engine_megatron.engine", "transformers.models.qwen2.modeling_qwen2"]
    )
    for seed in seeds:
        sys.stdout.write(
            json.dumps(
                kill_once(context, folder / str(seed), seed=seed, in_background=in_background)
            )
            + "\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "background", [int(seed) for seed in sys.argv[3:]])
