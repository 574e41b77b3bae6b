import asyncio
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from temper_engine_api.errors import BatchError, ConfigError, EngineStateError
from temper_legacy_shim.data_proto import DataProto
from temper_legacy_shim.deprecation import RECORDS, LegacyWorkerWarning
from temper_legacy_shim.workers import (
    ActorRolloutRefWorker,
    AsyncActorRolloutRefWorker,
    CriticWorker,
)

MakeData = Callable[..., DataProto]


@pytest.fixture
def open_worker() -> Iterator[Callable[[Any], Any]]:
    opened: list[Any] = []

    def open_it(worker: Any) -> Any:
        worker.init_model()
        opened.append(worker)
        return worker

    yield open_it
    for worker in opened:
        for part in (getattr(worker, name, None) for name in ("actor", "ref_policy", "critic")):
            if part is not None:
                part.engine.close()


@pytest.fixture
def worker(
    actor_config: dict[str, Any], open_worker: Callable[[Any], Any]
) -> ActorRolloutRefWorker:
    with pytest.warns(LegacyWorkerWarning, match="ActorRolloutRefWorker is deprecated") as caught:
        made = ActorRolloutRefWorker(config=actor_config, role="actor_rollout_ref")
    assert caught[0].filename == __file__
    return open_worker(made)


def open_actor(config: dict[str, Any], *, numerics: str) -> ActorRolloutRefWorker:
    """Open an actor without the warning, which comes once per location."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LegacyWorkerWarning)
        return ActorRolloutRefWorker(config, "actor", numerics=numerics)


def masked(data: DataProto, column: torch.Tensor) -> torch.Tensor:
    assert data.batch is not None
    return column[data.batch.column("response_mask").bool()]


@pytest.mark.bitwise
def test_before_an_update_actor_and_reference_agree_and_after_it_they_do_not(
    worker: ActorRolloutRefWorker, make_data: MakeData
) -> None:
    data = make_data(4)
    before = worker.compute_log_prob(data)
    reference = worker.compute_ref_log_prob(data)
    assert before.batch is not None
    assert reference.batch is not None
    assert before.batch.column("old_log_probs").shape == (4, 5)
    assert set(before.batch) == {"old_log_probs", "entropys"}
    assert torch.equal(before.batch.column("old_log_probs"), reference.batch.column("ref_log_prob"))
    output = worker.update_actor(data)
    metrics = output.meta_info["metrics"]
    assert isinstance(metrics, dict)
    assert metrics["actor/lr"] == 1e-2
    # Two mini-batches of two rows: a list entry each, and one number for the summed loss.
    assert [
        len(metrics[name]) for name in ("actor/grad_norm", "actor/ppo_kl", "actor/pg_clipfrac")
    ] == [2, 2, 2]
    assert isinstance(metrics["actor/pg_loss"], float)
    after = worker.compute_log_prob(data)
    again = worker.compute_ref_log_prob(data)
    assert after.batch is not None
    assert again.batch is not None
    assert (
        masked(data, after.batch.column("old_log_probs"))
        - masked(data, before.batch.column("old_log_probs"))
    ).abs().max() > 1e-3
    assert torch.equal(again.batch.column("ref_log_prob"), reference.batch.column("ref_log_prob"))


def test_generated_sequences_have_the_old_layout_and_the_actors_own_log_probs(
    worker: ActorRolloutRefWorker, make_data: MakeData
) -> None:
    data = make_data(4)
    worker.update_actor(data)
    assert data.batch is not None
    prompts = DataProto.from_dict(
        tensors={
            "input_ids": data.batch.column("prompts"),
            "attention_mask": data.batch.column("attention_mask")[:, :3],
            "position_ids": data.batch.column("position_ids")[:, :3],
        }
    )
    made = worker.generate_sequences(prompts)
    assert made.batch is not None
    assert {name: tuple(column.shape) for name, column in made.batch.items()} == {
        "prompts": (4, 3),
        "responses": (4, 6),
        "rollout_log_probs": (4, 6),
        "input_ids": (4, 9),
        "attention_mask": (4, 9),
        "position_ids": (4, 9),
    }
    measured = worker.compute_log_prob(made)
    assert measured.batch is not None
    is_real = made.batch.column("attention_mask")[:, 3:].bool()
    torch.testing.assert_close(
        measured.batch.column("old_log_probs")[is_real],
        made.batch.column("rollout_log_probs")[is_real],
        atol=1e-4,
        rtol=1e-4,
    )


@pytest.mark.bitwise
def test_a_checkpoint_brings_the_actor_back(
    worker: ActorRolloutRefWorker, make_data: MakeData, tmp_path: Path
) -> None:
    data = make_data(4)
    worker.update_actor(data)
    saved = worker.compute_log_prob(data)
    worker.save_checkpoint(str(tmp_path / "actor"), global_step=1)
    worker.update_actor(data)
    worker.load_checkpoint(str(tmp_path / "actor"))
    loaded = worker.compute_log_prob(data)
    assert saved.batch is not None
    assert loaded.batch is not None
    assert torch.equal(saved.batch.column("old_log_probs"), loaded.batch.column("old_log_probs"))
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "model_world_size_1_rank_0.pt").touch()
    with pytest.raises(ConfigError, match="temper-migrate checkpoint"):
        worker.load_checkpoint(str(tmp_path / "old"))


def test_the_old_warm_up_begins_at_zero_and_the_new_one_does_not(
    actor_config: dict[str, Any], make_data: MakeData, open_worker: Callable[[Any], Any]
) -> None:
    actor_config["actor"]["optim"] = {**actor_config["actor"]["optim"], "lr_warmup_steps": 2}
    rates = {}
    for numerics in ("legacy", "temper"):
        old = open_worker(open_actor(actor_config, numerics=numerics))
        rates[numerics] = [
            old.update_actor(make_data(4)).meta_info["metrics"]["actor/lr"] for _ in range(3)
        ]
    assert rates["legacy"] == pytest.approx([0.0, 5e-3, 1e-2])
    assert rates["temper"] == pytest.approx([5e-3, 1e-2, 1e-2])


def test_one_micro_batch_gives_old_and_new_numerics_the_same_update(
    actor_config: dict[str, Any], make_data: MakeData, open_worker: Callable[[Any], Any]
) -> None:
    # Whole mini-batches as micro-batches, token-mean: then the quirks have nothing to act on.
    result = []
    for numerics in ("legacy", "temper"):
        old = open_worker(open_actor(actor_config, numerics=numerics))
        metrics = old.update_actor(make_data(4)).meta_info["metrics"]
        result.append(
            (
                metrics["actor/grad_norm"],
                metrics["actor/ppo_kl"][0],
                old.compute_log_prob(make_data(4)).batch["old_log_probs"],
            )
        )
    assert result[0][0] == pytest.approx(result[1][0], rel=1e-5)
    torch.testing.assert_close(
        masked(make_data(4), result[0][2]), masked(make_data(4), result[1][2]), atol=1e-5, rtol=1e-5
    )


def test_the_async_worker_gives_its_sampler_the_actors_weights(
    actor_config: dict[str, Any], make_data: MakeData, open_worker: Callable[[Any], Any]
) -> None:
    with pytest.warns(
        LegacyWorkerWarning, match="AsyncActorRolloutRefWorker is deprecated"
    ) as caught:
        made = open_worker(AsyncActorRolloutRefWorker(actor_config, "actor_rollout"))
    assert len(caught) == 1
    version = made.rollout._sampler.weight_version
    asyncio.run(made.update_weights(global_steps=3))
    assert made.rollout._sampler.weight_version == version + 1


def test_the_critic_learns_and_masks_its_values(
    critic_config: dict[str, Any], make_data: MakeData, open_worker: Callable[[Any], Any]
) -> None:
    with pytest.warns(LegacyWorkerWarning, match="CriticWorker is deprecated"):
        critic = open_worker(CriticWorker(config=critic_config))
    data = make_data(4)
    values = critic.compute_values(data).batch["values"]
    assert bool((values[data.batch["response_mask"] == 0] == 0).all())  # type: ignore[index]
    metrics = critic.update_critic(data).meta_info["metrics"]
    assert [
        len(metrics[f"critic/{name}"]) for name in ("vf_clipfrac", "vpred_mean", "grad_norm")
    ] == [4, 4, 2]
    assert not torch.equal(critic.compute_values(data).batch["values"], values)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"actor": {"strategy": "megatron"}},
            "strategy is 'megatron', but the FSDP workers take fsdp or fsdp2",
        ),
        ({"actor": {"ulysses_sequence_parallel_size": 2}}, "ulysses_sequence_parallel_size is 2"),
        (
            {"actor": {"ppo_micro_batch_size_per_gpu": 3}},
            "must be a multiple of ppo_micro_batch_size_per_gpu, which is 3",
        ),
        ({"actor": {"optim": {"optimizer": "Adam8bit"}}}, "optim.optimizer is 'Adam8bit'"),
        ({"model": {"override_config": {"vocab_size": 3}}}, "model.override_config sets"),
    ],
)
def test_what_can_not_be_carried_on_is_named(
    actor_config: dict[str, Any], change: dict[str, Any], sentence: str
) -> None:
    for name, values in change.items():
        actor_config[name] = {**actor_config[name], **values}
    with pytest.warns(LegacyWorkerWarning):
        worker = ActorRolloutRefWorker(actor_config, "actor")
    with pytest.raises(ConfigError, match=sentence):
        worker.init_model()


@pytest.mark.parametrize(
    ("role", "block", "change"),
    [
        ("actor", "actor", {"ppo_micro_batch_size_per_gpu": 3}),
        ("actor_rollout_ref", "ref", {"fsdp_config": {"dtype": "int8"}}),
    ],
)
def test_policy_that_cannot_start_leaves_no_process_group(
    actor_config: dict[str, Any], role: str, block: str, change: dict[str, Any]
) -> None:
    actor_config[block] = {**actor_config[block], **change}
    with pytest.warns(LegacyWorkerWarning):
        worker = ActorRolloutRefWorker(actor_config, role)
    with pytest.raises(ConfigError):
        worker.init_model()
    assert not dist.is_initialized()


def test_critic_that_cannot_start_leaves_no_process_group(critic_config: dict[str, Any]) -> None:
    with pytest.warns(LegacyWorkerWarning):
        critic = CriticWorker(config={**critic_config, "ppo_micro_batch_size_per_gpu": 3})
    with pytest.raises(ConfigError, match="ppo_micro_batch_size_per_gpu"):
        critic.init_model()
    assert not dist.is_initialized()


def test_wrong_roles_keywords_and_calls_out_of_order_get_a_sentence(
    actor_config: dict[str, Any], make_data: MakeData
) -> None:
    with pytest.warns(LegacyWorkerWarning), pytest.raises(ConfigError, match="role is 'trainer'"):
        ActorRolloutRefWorker(actor_config, "trainer")
    with (
        pytest.warns(LegacyWorkerWarning),
        pytest.raises(ConfigError, match=r"keywords \['profiler'\] have no effect"),
    ):
        ActorRolloutRefWorker(actor_config, "actor", profiler=1)
    with pytest.warns(LegacyWorkerWarning):
        worker = ActorRolloutRefWorker(actor_config, "ref")
    with pytest.raises(EngineStateError, match="has no actor, or init_model"):
        worker.update_actor(make_data())
    with pytest.raises(BatchError, match="divide into 3 equal chunks"):
        make_data(4).chunk(3)


def test_every_old_class_has_a_record() -> None:
    names = {name.rpartition(".")[2] for name in RECORDS}
    assert names >= {
        "ActorRolloutRefWorker",
        "AsyncActorRolloutRefWorker",
        "CriticWorker",
        "DataParallelPPOActor",
        "DataParallelPPOCritic",
        "MegatronPPOActor",
        "MegatronPPOCritic",
    }


def test_the_critic_too_updates_alike_in_both_numerics_where_no_quirk_can_act(
    critic_config: dict[str, Any], make_data: MakeData, open_worker: Callable[[Any], Any]
) -> None:
    critic_config["ppo_micro_batch_size_per_gpu"] = 2
    norms = []
    for numerics in ("legacy", "temper"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LegacyWorkerWarning)
            critic = open_worker(CriticWorker(critic_config, numerics=numerics))
        norms.append(critic.update_critic(make_data(4)).meta_info["metrics"]["critic/grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_the_reference_of_an_adapter_is_the_actor_without_it(
    actor_config: dict[str, Any], make_data: MakeData, open_worker: Callable[[Any], Any]
) -> None:
    actor_config["model"] |= {"lora_rank": 2, "lora_alpha": 4, "target_modules": "all-linear"}
    with pytest.warns(LegacyWorkerWarning):
        worker = open_worker(ActorRolloutRefWorker(actor_config, "actor_rollout_ref"))
    assert worker.ref_policy is None
    data = make_data(4)
    before = worker.compute_log_prob(data).batch["old_log_probs"]
    for _ in range(2):
        worker.update_actor(data)
    reference = worker.compute_ref_log_prob(data).batch["ref_log_prob"]
    torch.testing.assert_close(masked(data, reference), masked(data, before), atol=1e-5, rtol=1e-5)
    after = worker.compute_log_prob(data).batch["old_log_probs"]
    assert (masked(data, after) - masked(data, before)).abs().max() > 1e-4
