"""Kill ranks at random moments while they save, and check what the last complete step contains.

For the tests of engine authors:

    for trial in run_trials(engine="fsdp", seeds=range(2), how="background", folder=tmp_path):
        check_trial(trial)

Two ranks of a tiny model train and save until they are killed, one rank first and then the other.
New ranks load the last complete step, possibly in another layout. The ranks are forked from a
process that has imported all modules, so a trial takes seconds.
"""

import hashlib
import json
import multiprocessing
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from temper_engine_api.batch import from_sequences
from temper_engine_api.checkpoint import list_complete_steps
from temper_engine_api.checkpoint.step_directories import list_partial_saves
from temper_engine_api.engine import BaseEngine
from temper_engine_api.registry import load_engine_class, load_engine_config_class
from temper_engine_api.specs import ModelSpec, OptimizerSpec, PrecisionSpec, Scalar

_WORLD_SIZE = 2
# About a megabyte with its moments: large enough that writing takes a while, small enough that
# starting does not.
_ARCHITECTURE: Mapping[str, Scalar] = {
    "model_type": "qwen2",
    "vocab_size": 499,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}

SaveMode = Literal["foreground", "background"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Result of one kill."""

    was_saving: bool
    """True if the kill left an incomplete step."""
    complete_before: int
    """Last complete step before the kill."""
    complete_after: list[int]
    """Complete steps after the kill."""
    loaded: list[int]
    """Step that each rank loaded."""
    loaded_digests: list[str]
    """Digest of the training state that each rank loaded."""
    saved_digest: str
    """Digest of the training state when that step was saved."""
    exit_codes: list[int]
    """Exit codes from the ranks that loaded."""


def run_trials(
    *,
    engine: str,
    seeds: Sequence[int],
    how: SaveMode,
    folder: Path,
    save_fields: Mapping[str, object] | None = None,
    load_fields: Mapping[str, object] | None = None,
    timeout_s: float = 1100.0,
) -> list[Trial]:
    """Run one trial per seed, each in a separate process.

    Args:
        engine: Name under which the engine is registered.
        seeds: Random seeds for when to kill.
        how: Whether the ranks save in the foreground or in the background.
        folder: Empty folder for checkpoints.
        save_fields: Config fields for the ranks that save, such as their layout.
        load_fields: Config fields for the ranks that load.
        timeout_s: Limit for all trials.
    """
    options = {"engine": engine, "save_fields": save_fields or {}, "load_fields": load_fields or {}}
    done = subprocess.run(
        [sys.executable, "-m", __name__, json.dumps(options), str(folder), how, *map(str, seeds)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=timeout_s,
    )
    trials = [Trial(**json.loads(line)) for line in done.stdout.splitlines()]
    assert len(trials) == len(seeds), f"{len(trials)} of {len(seeds)} trials reported a result"
    return trials


def check_trial(trial: Trial) -> None:
    """Check that all ranks loaded the last complete step, and exactly what was saved."""
    assert trial.loaded == [trial.complete_after[-1]] * _WORLD_SIZE
    assert trial.complete_after[-1] >= trial.complete_before, "a step that was complete is gone"
    assert trial.loaded_digests == [trial.saved_digest] * _WORLD_SIZE
    assert trial.exit_codes == [0] * _WORLD_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """Settings of one rank."""

    engine: str
    fields: Mapping[str, object]
    """Config fields of the engine beyond model, optimizer and precision."""
    rank: int
    rendezvous: str
    """File that the ranks use for their rendezvous."""
    folder: Path
    """Folder of the step directories and their digests."""
    in_background: bool


def _start_engine(job: _Job) -> BaseEngine:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{job.rendezvous}", rank=job.rank, world_size=_WORLD_SIZE
    )
    config = load_engine_config_class(job.engine)(
        model=ModelSpec(architecture=_ARCHITECTURE),
        optimizer=OptimizerSpec(lr=1e-2),
        precision=PrecisionSpec(compute="fp32"),
        device="cpu",
        **job.fields,  # type: ignore[arg-type]
    )
    engine = load_engine_class(job.engine)(config)
    engine.init_model()
    engine.set_loss_fn(
        lambda data, predictions, ctx: (-predictions["logprob"][data.loss_mask].mean(), ctx)
    )
    return engine


def _update(engine: BaseEngine, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    tokens = [torch.randint(0, 499, (length,), generator=generator) for length in (7, 12)]
    batch = from_sequences(tokens, loss_masks=[torch.arange(len(t)) >= 1 for t in tokens])
    engine.optimizer_zero_grad()
    with engine.train_mode():
        engine.forward_backward_step(batch)
    engine.optimizer_step()


def _state_digest(engine: BaseEngine) -> str:
    digest = hashlib.sha256()
    with engine.export_state() as stream:
        for entry in stream:
            for tensor in (entry.master, entry.first_moment, entry.second_moment):
                digest.update(tensor.numpy().tobytes())
            digest.update(str(entry.update_count).encode())
    return digest.hexdigest()


def _save_without_end(job: _Job, connection: Connection) -> None:
    """Train and save until killed.

    Sends the duration of the first save in seconds, then a message before each further save.
    """
    engine = _start_engine(job)
    for step in range(1, 10_000):
        _update(engine, step)
        digest = _state_digest(engine)
        if job.rank == 0:
            # Write the digest before the save, so that every step that may become complete has one.
            (job.folder / f"digest-{step}").write_text(digest)
        if step > 1:
            connection.send((step, ""))
        started = time.monotonic()
        engine.save_checkpoint(
            str(job.folder),
            global_step=step,
            # Few enough that kills also hit the deletion of an old step.
            max_ckpt_to_keep=2,
            # The first save always blocks: its duration is measured, and one step is complete
            # before a kill.
            in_background=job.in_background and step > 1,
        )
        if step == 1:
            connection.send((1, str(time.monotonic() - started)))


def _load_and_report(job: _Job, connection: Connection) -> None:
    """Send (updates, digest) of the last complete step, after one more update."""
    engine = _start_engine(job)
    engine.load_checkpoint(str(job.folder))
    loaded = (engine.num_updates, _state_digest(engine))
    # The loaded engine must be able to train, which needs the same state on all ranks.
    _update(engine, loaded[0] + 1)
    connection.send(loaded)
    engine.close()
    dist.destroy_process_group()
    assert threading.active_count() == 1, "the engine left a thread"


def _start_ranks(
    context: ForkServerContext, target: Callable[[_Job, Connection], None], job: _Job
) -> tuple[list[ForkServerProcess], list[Connection]]:
    processes, connections = [], []
    for rank in range(_WORLD_SIZE):
        parent_end, child_end = context.Pipe()
        process = context.Process(
            target=target, args=(replace(job, rank=rank), child_end), daemon=True
        )
        process.start()
        # If this process kept a copy open, recv() would not raise EOFError when the rank dies.
        child_end.close()
        processes.append(process)
        connections.append(parent_end)
    return processes, connections


def _receive(connections: Iterable[Connection]) -> list[tuple[int, str]]:
    received = []
    for connection in connections:
        assert connection.poll(120), "a rank sent nothing for two minutes"
        received.append(connection.recv())
    return received


def _kill_once(
    context: ForkServerContext,
    folder: Path,
    *,
    seed: int,
    how: SaveMode,
    engine: str,
    save_fields: Mapping[str, object],
    load_fields: Mapping[str, object],
) -> Trial:
    folder.mkdir(parents=True)
    draw = random.Random(f"kill {seed}")
    job = _Job(
        engine=engine,
        fields=save_fields,
        rank=0,
        rendezvous=str(folder / "meet-1"),
        folder=folder,
        in_background=how == "background",
    )
    processes, connections = _start_ranks(context, _save_without_end, job)
    save_duration_s = float(_receive(connections)[0][1])
    for _ in range(draw.randint(1, 3)):
        _receive(connections)
    # A little longer than a save at most, so that kills also hit the time just after its end.
    time.sleep(draw.uniform(0.0, 1.2 * save_duration_s))
    # Read before the kill: a step that completes in between only makes the later list longer.
    complete_before = list_complete_steps(folder)[-1]
    processes[draw.randrange(_WORLD_SIZE)].kill()
    time.sleep(draw.choice([0.0, 0.3]))  # the other rank continues for a moment, or dies with it
    for process in processes:
        process.kill()
        process.join()
    was_saving = bool(list_partial_saves(folder))
    # Another file, since the killed ranks left their keys in the first one.
    load_job = replace(job, fields=load_fields, rendezvous=str(folder / "meet-2"))
    processes, connections = _start_ranks(context, _load_and_report, load_job)
    loaded = _receive(connections)
    for process in processes:
        process.join(60)
    return Trial(
        was_saving=was_saving,
        complete_before=complete_before,
        complete_after=list_complete_steps(folder),
        loaded=[step for step, _ in loaded],
        loaded_digests=[digest for _, digest in loaded],
        saved_digest=(folder / f"digest-{loaded[0][0]}").read_text(),
        # None if the rank did not exit in time: not the 0 that is checked.
        exit_codes=[-1 if p.exitcode is None else p.exitcode for p in processes],
    )


def main(options: str, folder: str, how: str, *seeds: str) -> None:
    """Run trials and print one line of JSON for each; called by `run_trials`."""
    settings = json.loads(options)
    context = multiprocessing.get_context("forkserver")
    # Python 3.11 does not preload __main__, so its imports are named.
    context.set_forkserver_preload(
        [
            load_engine_class(settings["engine"]).__module__,
            "transformers.models.qwen2.modeling_qwen2",
        ]
    )
    mode: SaveMode = "background" if how == "background" else "foreground"
    for seed in seeds:
        trial = _kill_once(context, Path(folder, seed), seed=int(seed), how=mode, **settings)
        sys.stdout.write(json.dumps(asdict(trial)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
