"""Compare the Megatron classes with the FSDP classes, on one rank and on two.

No traces of the genuine classes exist: they need CUDA. What their source says is the reference
where they differ from the FSDP ones.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

pytest.importorskip(
    "megatron.core", reason="the Megatron classes need temper-engine-megatron and Megatron-Core"
)

from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # after the skip

from temper_engine_api.conformance.harness.rank_pool import RankPool
from temper_engine_api.engine import BaseEngine
from temper_engine_api.errors import BatchError, CapabilityError, ConfigError
from temper_engine_api.layout import Layout
from temper_engine_api.registry import load_engine_class
from temper_engine_api.specs import ModelSpec, OptimizerSpec, PrecisionSpec
from temper_engine_fsdp.config import FSDPConfig
from temper_engine_megatron.config import MegatronConfig
from temper_legacy_shim.data_proto import DataProto
from temper_legacy_shim.deprecation import LegacyWorkerWarning
from temper_legacy_shim.workers import MegatronPPOActor, megatron_workers
from temper_legacy_shim.workers.batches.updates import OldMegatronSchedule
from temper_legacy_shim.workers.megatron_ppo import MegatronActor, MegatronCritic
from temper_legacy_shim.workers.ppo_actor import PPOActor
from temper_legacy_shim.workers.ppo_critic import PPOCritic

MakeData = Callable[..., DataProto]
ADAMW = OptimizerSpec(lr=1e-2, weight_decay=0.0, clip_grad_norm=1.0)
FP32 = PrecisionSpec(compute="fp32")
CLOSE = {"rtol": 2e-5, "atol": 2e-5}
LAYOUTS = {
    "tp2": Layout(name="tp2", world_size=2, fields={"tensor_parallel": 2}),
    "pp2": Layout(name="pp2", world_size=2, fields={"pipeline_parallel": 2}),
    "dp2": Layout(name="dp2", world_size=2, fields={"distributed_optimizer": True}),
}
ACTOR = {
    "ppo_mini_batch_size": 4,
    "ppo_micro_batch_size_per_gpu": 2,
    "loss_agg_mode": "token-mean",
    "entropy_coeff": 0.01,
    "use_kl_loss": True,
    "use_rollout_log_probs": True,
}
CRITIC = {
    "ppo_mini_batch_size": 4,
    "ppo_micro_batch_size_per_gpu": 2,
    "loss_agg_mode": "token-mean",
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Yield the classes' warnings have tests of their own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LegacyWorkerWarning)
        yield


@pytest.fixture(scope="session")
def two_layers(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """Return a model with a layer for each of two stages."""
    folder = tmp_path_factory.mktemp("two_layers")
    config = AutoConfig.from_pretrained(model_folder)
    config.update(
        {
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "layer_types": ["full_attention"] * 2,
        }
    )
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rank_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    rank_pool = RankPool(2, folder=tmp_path_factory.mktemp("rank_pool"), job_timeout_s=240)
    yield rank_pool
    rank_pool.close()


def open_engine(
    name: str,
    folder: Path,
    *,
    kind: str = "language_model",
    layout: Mapping[str, Any] | None = None,
    optimizer: OptimizerSpec = ADAMW,
) -> BaseEngine:
    spec = ModelSpec(path=str(folder), model_type=kind)  # type: ignore[arg-type]
    cls: Any = MegatronConfig if name == "megatron" else FSDPConfig
    engine: BaseEngine = load_engine_class(name)(
        cls(model=spec, optimizer=optimizer, precision=FP32, device="cpu", **(layout or {}))
    )
    engine.init_model()
    return engine


def call_twice(old: Any, data: DataProto) -> dict[str, Any]:
    """Return metrics of two mini-batches, and log-probs before and after the update."""
    if isinstance(old, MegatronActor):
        logprobs, entropies, _ = old.compute_log_prob(data, calculate_entropy=True)
        metrics = old.update_policy(old.make_minibatch_iterator(data))
        after = old.compute_log_prob(data)[0]
    else:
        first = old.compute_log_prob(data, calculate_entropy=True)
        logprobs, entropies, metrics = (
            first["log_probs"],
            first["entropys"],
            old.update_policy(data),
        )
        after = old.compute_log_prob(data)["log_probs"]
    return {"logprobs": logprobs, "entropies": entropies, "metrics": metrics, "after": after}


def train_actor(rank: Any, *, folder: Path, data: DataProto, numerics: str) -> dict[str, Any]:
    """Train on one rank of a layout with its rows."""
    engine = open_engine("megatron", folder, layout=rank.layout.fields)
    config, rows = ACTOR, list(range(8))
    if engine.topology.dp.size == 2:
        # Both mini-batches of four rows consist of the same rows as on one rank.
        config, rows = (
            {**ACTOR, "ppo_mini_batch_size": 2},
            [[0, 1, 4, 5], [2, 3, 6, 7]][engine.topology.dp.rank],
        )
    actor = MegatronActor(config, engine, None, numerics=numerics)  # type: ignore[arg-type]
    result = call_twice(actor, data[rows])
    engine.close()
    return result


@pytest.fixture(scope="module")
def fsdp_actor(two_layers: Path) -> Callable[[DataProto, str], dict[str, Any]]:
    seen: dict[str, dict[str, Any]] = {}

    def measure(data: DataProto, numerics: str) -> dict[str, Any]:
        if numerics not in seen:
            engine = open_engine("fsdp", two_layers)
            seen[numerics] = call_twice(PPOActor(ACTOR, engine, numerics=numerics), data)  # type: ignore[arg-type]
            engine.close()
        return seen[numerics]

    return measure


@pytest.mark.parametrize(
    ("layout", "numerics"),
    [("tp2", "legacy"), ("pp2", "legacy"), ("pp2", "temper"), ("dp2", "temper")],
)
def test_the_actor_trains_as_its_fsdp_sibling_does(
    rank_pool: RankPool,
    fsdp_actor: Any,
    two_layers: Path,
    make_data: MakeData,
    layout: str,
    numerics: str,
) -> None:
    data = make_data(8)
    expected = fsdp_actor(data, numerics)
    result = rank_pool.run(
        train_actor,
        engine="megatron",
        layout=LAYOUTS[layout],
        arguments={"folder": two_layers, "data": data, "numerics": numerics},
    )
    for rank in [joined(result)] if layout == "dp2" else result:
        for name in ("logprobs", "entropies"):
            torch.testing.assert_close(rank[name], expected[name], **CLOSE)
        torch.testing.assert_close(rank["after"], expected["after"], rtol=2e-4, atol=2e-4)
        metrics, required = rank["metrics"], expected["metrics"]
        assert metrics["actor/grad_norm"] == pytest.approx(required["actor/grad_norm"], rel=1e-4)
        for name in ("actor/ppo_kl", "actor/pg_clipfrac"):
            assert metrics[name] == pytest.approx(required[name], rel=1e-4, abs=1e-5)


def joined(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the rows of both ranks in the order of the batch, with the metrics of the first."""
    order = [0, 1, 4, 5, 2, 3, 6, 7]
    return {
        **ranks[0],
        **{
            name: torch.cat([rank[name] for rank in ranks])[order]
            for name in ("logprobs", "entropies", "after")
        },
    }


def test_the_policys_loss_is_listed_without_the_entropy(
    fsdp_actor: Any, two_layers: Path, make_data: MakeData
) -> None:
    # The FSDP class counts the entropy away from its policy loss in place, sums, and weighs by
    # rows; here all micro-batches have two.
    data = make_data(8)
    engine = open_engine("megatron", two_layers)
    actor = MegatronActor(ACTOR, engine, None, numerics="legacy")
    metrics: Any = actor.update_policy(actor.make_minibatch_iterator(data))
    engine.close()
    required = fsdp_actor(data, "legacy")["metrics"]
    assert "actor/entropy" not in metrics
    # Two mini-batches of two micro-batches each.
    assert [
        len(metrics[name]) for name in ("actor/pg_loss", "actor/kl_loss", "actor/grad_norm")
    ] == [4, 4, 2]
    without_entropy = required["actor/pg_loss"] + 0.01 * sum(required["actor/entropy"]) / 2
    assert sum(metrics["actor/pg_loss"]) / 2 == pytest.approx(without_entropy, rel=1e-4)
    assert sum(metrics["actor/kl_loss"]) / 2 == pytest.approx(required["actor/kl_loss"], rel=1e-4)


def test_every_micro_batch_weighs_the_same_however_many_rows_it_has(
    two_layers: Path, make_data: MakeData
) -> None:
    # Three rows in micro-batches of two and one: (g(two rows) + g(one row)) / 2, where the FSDP
    # class takes 1 / (3 // 2) = 1 of each.
    data = make_data(3)
    full = gradients_of(two_layers, data, mini=3)
    first, second = (
        gradients_of(two_layers, data[rows], mini=len(data[rows]))
        for rows in (slice(0, 2), slice(2, 3))
    )
    for name, gradient in full.items():
        torch.testing.assert_close(gradient, (first[name] + second[name]) / 2, rtol=1e-4, atol=1e-6)


def gradients_of(folder: Path, data: DataProto, *, mini: int) -> dict[str, Tensor]:
    """Return gradients of the first update: ten times the first moments."""
    engine = open_engine("megatron", folder, optimizer=replace(ADAMW, clip_grad_norm=None))
    actor = MegatronActor({**ACTOR, "ppo_mini_batch_size": mini}, engine, None, numerics="legacy")
    actor.update_policy(actor.make_minibatch_iterator(data))
    result = {state.name: 10 * state.first_moment for state in engine.export_state()}
    engine.close()
    return result


def test_the_critic_trains_as_its_fsdp_sibling_does_where_masks_agree(
    two_layers: Path, make_data: MakeData
) -> None:
    data = make_data(8)
    values, metrics = {}, {}
    for name, cls in (("megatron", MegatronCritic), ("fsdp", PPOCritic)):
        engine = open_engine(name, two_layers, kind="value_model")
        critic: Any = cls(CRITIC, engine, None, numerics="legacy")
        before = critic.compute_values(data)
        metrics[name] = critic.update_critic(
            critic.make_minibatch_iterator(data) if name == "megatron" else data
        )
        values[name] = (before, critic.compute_values(data))
        engine.close()
    torch.testing.assert_close(values["megatron"][0], values["fsdp"][0], **CLOSE)
    torch.testing.assert_close(values["megatron"][1], values["fsdp"][1], rtol=2e-4, atol=2e-4)
    for key in ("critic/grad_norm", "critic/vf_clipfrac", "critic/vpred_mean"):
        assert metrics["megatron"][key] == pytest.approx(metrics["fsdp"][key], rel=1e-4, abs=1e-5)
    assert sum(metrics["megatron"]["critic/vf_loss"]) / 2 == pytest.approx(
        metrics["fsdp"]["critic/vf_loss"], rel=1e-4
    )
    assert metrics["megatron"]["critic/lr"] == [1e-2, 1e-2]


def test_the_critics_mask_is_the_attention_mask(two_layers: Path, make_data: MakeData) -> None:
    data = make_data(4)
    assert data.batch is not None
    data.batch["response_mask"] = torch.zeros_like(data.batch.column("response_mask"))
    engine = open_engine("megatron", two_layers, kind="value_model")
    critic = MegatronCritic(CRITIC, engine, None, numerics="legacy")
    metrics: Any = critic.update_critic(critic.make_minibatch_iterator(data))
    engine.close()
    assert metrics["critic/grad_norm"][0] > 1e-3


def test_mini_batches_come_in_the_order_of_the_seed(two_layers: Path, make_data: MakeData) -> None:
    engine = open_engine("megatron", two_layers)
    orders = []
    for seed in (3, 3, 4):
        config = {**ACTOR, "shuffle": True, "data_loader_seed": seed, "ppo_epochs": 2}
        actor = MegatronActor(config, engine, None, numerics="legacy")
        orders.append(
            [
                tuple(part.batch["advantages"][:, 0].tolist())
                for part in actor.make_minibatch_iterator(make_data(8))
            ]
        )
    assert orders[0] == orders[1] != orders[2]
    assert len(orders[0]) == 4
    with pytest.raises(
        BatchError, match="7 rows, but must be a multiple of ppo_mini_batch_size, 4"
    ):
        actor.make_minibatch_iterator(make_data(7))
    engine.close()


def test_a_plain_model_gets_its_weights_back(two_layers: Path, make_data: MakeData) -> None:
    model = AutoModelForCausalLM.from_pretrained(two_layers, dtype=torch.float32)
    before = model.lm_head.weight.detach().clone()
    actor = MegatronPPOActor(
        ACTOR, None, None, None, model, torch.optim.AdamW(model.parameters(), lr=1e-2)
    )
    actor.update_policy(actor.make_minibatch_iterator(make_data(8)))
    with actor.engine.export_weights() as stream:
        exported = dict(stream)
    actor.engine.close()
    assert torch.equal(exported["lm_head.weight"], model.lm_head.weight)
    assert not torch.equal(before, model.lm_head.weight)


def test_what_megatron_classes_do_not_carry_on_is_named(two_layers: Path) -> None:
    with pytest.raises(
        ConfigError, match="the module is a ModuleList: pass the plain Hugging Face model"
    ):
        MegatronPPOActor(ACTOR, None, None, None, torch.nn.ModuleList(), None)
    engine = open_engine("megatron", two_layers)
    actor = MegatronPPOActor(ACTOR, None, None, None, engine)
    with pytest.raises(CapabilityError, match=r"call engine.forward_backward_batch\(\)"):
        actor.forward_backward_batch(None)
    with pytest.raises(CapabilityError, match="enable_mtp is set"):
        actor.update_policy([], enable_mtp=True)
    engine.close()


SCHEDULES: tuple[dict[str, Any], ...] = (
    {"lr_warmup_steps": 3},
    {"lr_warmup_steps_ratio": 0.3, "total_training_steps": 10, "lr_warmup_init": 1e-3},
    {"lr_decay_style": "linear", "total_training_steps": 10, "lr_warmup_steps": 2, "min_lr": 1e-4},
    {"lr_decay_style": "cosine", "lr_decay_steps": 8, "total_training_steps": 99, "min_lr": 1e-3},
    {"lr_decay_style": "inverse-square-root", "total_training_steps": 10, "lr_warmup_steps": 2},
)


@pytest.mark.parametrize("values", SCHEDULES, ids=str)
def test_rates_are_those_of_megatrons_own_scheduler(values: dict[str, Any]) -> None:
    target = OldMegatronSchedule(lr=1e-2, **values)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    other = OptimizerParamScheduler(
        optimizer,
        init_lr=target.lr_warmup_init,
        max_lr=target.lr,
        min_lr=target.min_lr,
        lr_warmup_steps=target.warmup,
        lr_decay_steps=max(target.end, target.warmup + 1),
        lr_decay_style=target.lr_decay_style,
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=99,
        wd_incr_style="constant",
    )
    for step in range(13):
        assert target.rate(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9), step
        other.step(1)


OPTIM = {"lr": 1e-2, "weight_decay": 0.0, "lr_warmup_steps": 2, "clip_grad": 1.0}
MEGATRON = {"dtype": "float32", "tensor_model_parallel_size": 1, "sequence_parallel": True}


@pytest.fixture
def policy_config(actor_config: dict[str, Any]) -> dict[str, Any]:
    """Return an old Megatron ``actor_rollout_ref`` block."""
    actor_config["actor"] |= {"strategy": "megatron", "optim": OPTIM, "megatron": MEGATRON}
    del actor_config["actor"]["fsdp_config"]
    actor_config["ref"] = {"strategy": "megatron", "log_prob_micro_batch_size_per_gpu": 4}
    return actor_config


@pytest.mark.bitwise
def test_a_worker_of_all_roles_trains_samples_saves_and_loads(
    policy_config: dict[str, Any], make_data: MakeData, tmp_path: Path
) -> None:
    worker = megatron_workers.AsyncActorRolloutRefWorker(policy_config, "actor_rollout_ref")
    worker.init_model()
    data = make_data(4)
    before, reference = (
        answers(worker.compute_log_prob(data)),
        answers(worker.compute_ref_log_prob(data)),
    )
    assert set(before) == {"old_log_probs", "entropys"}
    assert torch.equal(before["old_log_probs"], reference["ref_log_prob"])
    metrics = [worker.update_actor(data).meta_info["metrics"] for _ in range(2)]
    assert [result["actor/lr"] for result in metrics] == pytest.approx([0.0, 5e-3])  # type: ignore[index,call-overload]
    saved = answers(worker.compute_log_prob(data))
    assert torch.equal(
        answers(worker.compute_ref_log_prob(data))["ref_log_prob"], reference["ref_log_prob"]
    )
    assert not torch.equal(saved["old_log_probs"], before["old_log_probs"])
    worker.save_checkpoint(str(tmp_path / "actor"), global_step=2)
    worker.async_calls_finalize_fn_exec(blocking=True)
    later = worker.update_actor(data).meta_info["metrics"]
    worker.load_checkpoint(str(tmp_path / "actor"))
    assert torch.equal(
        answers(worker.compute_log_prob(data))["old_log_probs"], saved["old_log_probs"]
    )
    again = worker.update_actor(data).meta_info["metrics"]
    assert again["actor/lr"] == later["actor/lr"] == 1e-2  # type: ignore[index,call-overload]
    made = worker.generate_sequences(data.select(["input_ids", "attention_mask", "position_ids"]))
    assert answers(made)["responses"].shape == (4, 6)
    for policy in (worker.actor, worker.ref_policy):
        assert policy is not None
        policy.engine.close()


def test_a_critic_worker_learns(critic_config: dict[str, Any], make_data: MakeData) -> None:
    critic_config |= {
        "strategy": "megatron",
        "optim": OPTIM | {"lr_warmup_steps": -1},
        "megatron": MEGATRON,
    }
    worker = megatron_workers.CriticWorker(critic_config)
    worker.init_model()
    data = make_data(4)
    before = answers(worker.compute_values(data))["values"]
    data.meta_info["global_token_num"] = [5, 6, 5, 7]
    metrics: Any = worker.update_critic(data).meta_info["metrics"]
    assert 0 < metrics["perf/mfu/critic"] < 1
    assert len(metrics["critic/vf_loss"]) == 4
    assert metrics["critic/lr"] == 1e-2
    assert not torch.equal(answers(worker.compute_values(data))["values"], before)
    assert worker.critic is not None
    worker.critic.engine.close()


def answers(data: DataProto) -> dict[str, Tensor]:
    assert data.batch is not None
    return dict(data.batch.items())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"strategy": "fsdp"}, "strategy is 'fsdp', but the Megatron workers take megatron"),
        (
            {"megatron": {"tensor_model_parallel_size": "two"}},
            "tensor_model_parallel_size is 'two', but must be a whole number",
        ),
        ({"megatron": {"use_dist_checkpointing": True}}, "temper-migrate checkpoint DIR --to hf"),
        (
            {"megatron": {"override_transformer_config": {"recompute_granularity": "full"}}},
            "overrides recompute_granularity",
        ),
        ({"optim": {"optimizer": "sgd"}}, "carry on adam without further options"),
        ({"optim": {"lr": 1e-2, "lr_decay_style": "linear"}}, "set optim.lr_decay_steps"),
    ],
)
def test_settings_that_can_not_be_carried_on_are_named(
    policy_config: dict[str, Any], change: dict[str, Any], sentence: str
) -> None:
    policy_config["actor"] |= change
    worker = megatron_workers.ActorRolloutRefWorker(policy_config, "actor", numerics="temper")
    with pytest.raises(ConfigError, match=sentence):
        worker.init_model()
