"""Test the worker group of a role, inline and as Ray actors, with the same tests."""

import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from temper_engine_api.batch import from_sequences
from temper_engine_api.capabilities import Capability
from temper_engine_api.errors import CapabilityError, EngineStateError
from temper_engine_api.objective import HeadOutput
from temper_engine_api.plan import build_packed_batch, plan_mini_batch
from temper_engine_api.reduction import count_denominators
from temper_engine_api.specs import ModelSpec
from temper_engine_fsdp.config import FSDPConfig
from temper_trainer import redaction
from temper_trainer.algorithms.objectives.supervised_losses import SftObjective
from temper_trainer.runtime.worker_group import InlineWorkerGroup, TrainingWorker, WorkerGroup

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
ARCHITECTURE = {"model_type": "qwen2", "vocab_size": 23, "max_position_embeddings": 32, **SIZES}
CONFIG = FSDPConfig(model=ModelSpec(architecture=ARCHITECTURE, seed=1), device="cpu")
TOKENS = [torch.tensor([3, 1, 4, 1, 5]), torch.tensor([9, 2, 6]), torch.tensor([5, 3, 5, 8])]
LENGTHS = [len(tokens) for tokens in TOKENS]
SAMPLES = from_sequences(TOKENS, loss_masks=[torch.arange(length) > 0 for length in LENGTHS])
RANK_BATCH = build_packed_batch(
    SAMPLES,
    plan=plan_mini_batch(LENGTHS, dp_size=1, max_tokens=9),
    rank=0,
    denominators=count_denominators(SAMPLES),
)


def raises(worker: TrainingWorker, reason: str) -> None:
    raise KeyError(reason)


@pytest.fixture(scope="class")
def group(request: pytest.FixtureRequest) -> Iterator[WorkerGroup]:
    made: WorkerGroup
    if request.param == "inline":
        made = InlineWorkerGroup("actor", engine_name="fsdp", config=CONFIG)
        made.init()
        yield made
        made.close()
        return
    ray = pytest.importorskip(
        "ray", reason="Ray is not installed: pip install './packages/trainer[ray]'"
    )
    from temper_trainer.runtime.ray.ray_worker_group import RayWorkerGroup, RoleActor

    paths = (str(Path(__file__).parent), os.environ["PYTHONPATH"])
    here = {"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}}
    ray.init(
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        runtime_env=here,
    )
    actors = [ray.remote(RoleActor).options(num_cpus=1).remote()]
    made = RayWorkerGroup(
        "actor",
        actors=actors,
        engine_name="fsdp",
        config=CONFIG,
        num_threads=1,
        timeout_s=120.0,
        is_deprecated=False,
    )
    made.init()
    yield made
    made.close()
    ray.shutdown()


@pytest.fixture(scope="module")
def engine_logprobs() -> torch.Tensor:
    """The same model's, asked without a group."""
    from temper_engine_fsdp.engine import FSDPEngine

    engine = FSDPEngine(CONFIG)
    engine.init_model()
    with engine.eval_mode():
        outputs = engine.forward_backward_batch(
            RANK_BATCH, forward_only=True, outputs=(HeadOutput.LOGPROB,)
        ).outputs
    engine.close()
    assert outputs is not None
    return outputs.reorder(SAMPLES.sample_ids).columns[HeadOutput.LOGPROB]


def test_rendezvous_port_of_rank_0_is_reserved() -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install './packages/trainer[ray]'")
    from temper_trainer.runtime.ray.ray_worker_group import RoleActor

    actor = RoleActor()
    meeting_point = actor.rendezvous("token")
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(meeting_point)


def test_actor_hides_secrets_of_the_configuration_in_what_it_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install './packages/trainer[ray]'")
    from temper_trainer.runtime.ray.ray_worker_group import RoleActor

    monkeypatch.setattr(redaction, "_registered", set())
    RoleActor().prepare("fsdp", ["value-of-a-setting"])
    sys.stderr.write("value-of-a-setting\n")
    assert capsys.readouterr().err == "<hidden>\n"


@pytest.mark.parametrize(
    "group", ["inline", pytest.param("ray", marks=pytest.mark.ray)], indirect=True
)
class TestWorkerGroup:
    def test_role_reports_its_data_parallel_size(self, group: WorkerGroup) -> None:
        assert (group.num_workers, group.dp_size) == (1, 1)
        with pytest.raises(EngineStateError, match="1 data-parallel ranks, but got 2 parts"):
            group.update([RANK_BATCH, RANK_BATCH], is_last_of_step=True)

    def test_outputs_are_the_engines_in_the_requested_order(
        self, group: WorkerGroup, engine_logprobs: torch.Tensor
    ) -> None:
        backwards = SAMPLES.sample_ids.flip(0)
        answered = group.forward(
            [RANK_BATCH], outputs=(HeadOutput.LOGPROB,), sample_ids=backwards
        ).columns[HeadOutput.LOGPROB]
        assert torch.equal(answered, torch.cat(engine_logprobs.split(LENGTHS)[::-1]))

    def test_error_of_a_worker_is_raised_unchanged(self, group: WorkerGroup) -> None:
        with pytest.raises(KeyError, match="no such thing"):
            group.run(raises, [("no such thing",)])

    def test_missing_capability_of_the_engine_is_refused(self, group: WorkerGroup) -> None:
        with pytest.raises(CapabilityError, match="FSDPEngine does not offer 'pipeline_parallel'"):
            group.require(Capability.PIPELINE_PARALLEL)

    def test_written_part_restores_weights_and_moments(
        self, group: WorkerGroup, tmp_path: Path
    ) -> None:
        group.set_objective(SftObjective())
        group.update([RANK_BATCH], is_last_of_step=True)
        (report,) = group.write_part(str(tmp_path))
        assert report.files
        once = group.update([RANK_BATCH], is_last_of_step=True)
        group.read_part(str(tmp_path))
        again = group.update([RANK_BATCH], is_last_of_step=True)
        assert again.report.outcome == "stepped"
        assert again.report.grad_norm == once.report.grad_norm
        assert again.metrics["loss"].result == once.metrics["loss"].result


@dataclass(frozen=True)
class Stored:
    """Reference of the object store of a test."""

    value: object


def test_ranks_of_a_replica_get_one_stored_copy_of_their_shard() -> None:
    module = pytest.importorskip(
        "temper_trainer.runtime.ray.ray_worker_group",
        reason="Ray is not installed: pip install './packages/trainer[ray]'",
        exc_type=ImportError,
    )
    first, second, third = (["shard 0"],), (["shard 0"],), (["shard 2"],)
    stored: list[object] = []

    def put(value: object) -> Stored:
        stored.append(value)
        return Stored(value)

    given = module.store_shared_arguments([first, first, second, third, third, third], put=put)
    # Equal, but another object: serialized with the call of its only rank.
    assert given[2] is second
    assert given == [Stored(first), Stored(first), second, *[Stored(third)] * 3]
    assert len(stored) == 2
