import inspect
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from temper_engine_api.errors import BatchError, ConfigError
from temper_legacy_shim.data_proto import DataProto
from temper_legacy_shim.deprecation import LegacyWorkerWarning
from temper_legacy_shim.workers import DataParallelPPOActor, DataParallelPPOCritic

MakeData = Callable[..., DataProto]
CONFIG = {
    "ppo_mini_batch_size": 2,
    "ppo_micro_batch_size_per_gpu": 1,
    "grad_clip": 1.0,
    "loss_agg_mode": "seq-mean-token-sum",
}


def load_model(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def make_actor(
    folder: Path, **settings: object
) -> tuple[DataParallelPPOActor, torch.nn.Module, torch.optim.Optimizer]:
    model = load_model(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with pytest.warns(LegacyWorkerWarning, match="DataParallelPPOActor is deprecated") as caught:
        actor = DataParallelPPOActor({**CONFIG, **settings}, model, optimizer)
    assert caught[0].filename == __file__
    return actor, model, optimizer


def test_the_old_signatures_stand() -> None:
    assert list(inspect.signature(DataParallelPPOActor).parameters)[:3] == [
        "config",
        "actor_module",
        "actor_optimizer",
    ]
    assert list(inspect.signature(DataParallelPPOCritic).parameters)[:3] == [
        "config",
        "critic_module",
        "critic_optimizer",
    ]


def test_a_plain_model_gets_its_trained_weights_back_and_equals_torchs_own_training(
    model_folder: Path, make_data: MakeData
) -> None:
    actor, model, _ = make_actor(
        model_folder,
        ppo_mini_batch_size=4,
        ppo_micro_batch_size_per_gpu=4,
        use_rollout_log_probs=True,
    )
    data = make_data(4)
    tensors = data.batch
    assert tensors is not None
    log_probs = actor.compute_log_prob(data)["log_probs"]
    metrics = actor.update_policy(data)
    actor.engine.close()

    twin = load_model(model_folder)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    ids, mask = tensors.column("input_ids"), tensors.column("response_mask").bool()
    logits = twin(
        input_ids=ids,
        attention_mask=tensors.column("attention_mask"),
        position_ids=tensors.column("position_ids"),
    ).logits
    own = torch.log_softmax(logits[:, 2:-1].float(), -1).gather(-1, ids[:, 3:, None])[..., 0]
    torch.testing.assert_close(log_probs[mask], own.detach()[mask], atol=1e-5, rtol=1e-5)
    ratio, advantages = (own - tensors.column("old_log_probs")).exp(), tensors.column("advantages")
    worse = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    loss = torch.where(advantages < 0, torch.minimum(-advantages * 3.0, worse), worse)
    ((loss * mask).sum(1)).mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
    optimizer.step()
    assert metrics["actor/grad_norm"] == [pytest.approx(float(norm), rel=1e-4)]
    for (name, parameter), (_, expected) in zip(
        model.named_parameters(), twin.named_parameters(), strict=True
    ):
        torch.testing.assert_close(
            parameter, expected, atol=2e-4, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_the_optimisers_learning_rate_is_read_at_each_update(
    model_folder: Path, make_data: MakeData
) -> None:
    actor, model, optimizer = make_actor(model_folder)
    before = [parameter.clone() for parameter in model.parameters()]
    optimizer.param_groups[0]["lr"] = 0.0
    actor.update_policy(make_data(4))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    optimizer.param_groups[0]["lr"] = 1e-2
    actor.update_policy(make_data(4))
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    actor.engine.close()


def test_weights_that_the_user_loads_into_the_model_are_what_is_requested_next(
    model_folder: Path, make_data: MakeData
) -> None:
    actor, model, _ = make_actor(model_folder)
    before = actor.compute_log_prob(make_data(4))["log_probs"]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    assert not torch.allclose(actor.compute_log_prob(make_data(4))["log_probs"], before)
    actor.engine.close()


def test_a_critic_of_transformers_own_kind_is_taken_too(
    model_folder: Path, make_data: MakeData
) -> None:
    model = AutoModelForTokenClassification.from_pretrained(
        model_folder, num_labels=1, dtype=torch.float32
    )
    with pytest.warns(LegacyWorkerWarning, match="DataParallelPPOCritic is deprecated"):
        critic = DataParallelPPOCritic(
            dict(CONFIG), model, torch.optim.AdamW(model.parameters(), lr=1e-2)
        )
    data = make_data(4)
    before = critic.compute_values(data)
    metrics = critic.update_critic(data)
    assert [len(metrics[name]) for name in ("critic/vf_clipfrac", "critic/grad_norm")] == [4, 2]  # type: ignore[arg-type]
    assert not torch.equal(critic.compute_values(data), before)
    critic.engine.close()


def test_what_can_not_be_adopted_gets_a_sentence(model_folder: Path) -> None:
    model = load_model(model_folder)
    with (
        pytest.warns(LegacyWorkerWarning),
        pytest.raises(
            ConfigError, match="the module is a Linear: pass the plain Hugging Face model"
        ),
    ):
        DataParallelPPOActor(CONFIG, torch.nn.Linear(2, 2))
    with (
        pytest.warns(LegacyWorkerWarning),
        pytest.raises(ConfigError, match="the optimizer is a SGD with 1 parameter groups"),
    ):
        DataParallelPPOActor(CONFIG, model, torch.optim.SGD(model.parameters(), lr=0.1))
    with (
        pytest.warns(LegacyWorkerWarning),
        pytest.raises(ConfigError, match="numerics is 'old', but must be legacy or temper"),
    ):
        DataParallelPPOActor(CONFIG, model, numerics="old")  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match="overrides _forward_micro_batch, which training no longer calls"
    ):

        class Derived(DataParallelPPOActor):
            def _forward_micro_batch(self, micro_batch, temperature, calculate_entropy=False):  # type: ignore[no-untyped-def]
                raise NotImplementedError


def test_copies_of_models_from_failed_calls_and_killed_processes_are_removed(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    killed = (
        "import os, signal\n"
        "from temper_engine_api.process_folders import make_temporary_folder\n"
        "make_temporary_folder('adopted')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", killed], check=False)
    assert len(list(tmp_path.glob("temper-adopted-*"))) == 1
    model = load_model(model_folder)
    with (
        pytest.warns(LegacyWorkerWarning),
        pytest.raises(ConfigError, match="the optimizer is a SGD"),
    ):
        DataParallelPPOActor(CONFIG, model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert list(tmp_path.glob("temper-adopted-*")) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"position_ids": torch.zeros(4, 3, 8)}, "positions of several axes"),
        (
            {"response_mask": torch.ones(4, 5, dtype=torch.int64)},
            "response_mask of row 1 is 1 where attention_mask is 0",
        ),
        ({"temperature": 0}, r"meta_info\['temperature'\] is 0, but must be the number above 0"),
        ({"micro_batch_size": None}, r"meta_info\['micro_batch_size'\] is None"),
    ],
)
def test_a_wrong_batch_is_refused_before_anything_runs(
    model_folder: Path, make_data: MakeData, change: dict[str, object], sentence: str
) -> None:
    actor, _, _ = make_actor(model_folder)
    data = make_data(4)
    assert data.batch is not None
    for name, value in change.items():
        if isinstance(value, torch.Tensor):
            data.batch[name] = value
        else:
            data.meta_info[name] = value
    with pytest.raises(BatchError, match=sentence):
        actor.compute_log_prob(data)
    actor.engine.close()


def test_a_critics_single_forward_gives_its_values_without_gradient(
    model_folder: Path, make_data: MakeData
) -> None:
    model = AutoModelForTokenClassification.from_pretrained(
        model_folder, num_labels=1, dtype=torch.float32
    )
    with pytest.warns(LegacyWorkerWarning):
        critic = DataParallelPPOCritic(
            dict(CONFIG), model, torch.optim.AdamW(model.parameters(), lr=1e-2)
        )
    data = make_data(4)
    assert data.batch is not None
    names = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask")
    tensors = {name: data.batch.column(name) for name in names}
    with torch.no_grad():
        values = critic._forward_micro_batch(tensors)
        mask = tensors["response_mask"].bool()
        torch.testing.assert_close(values[mask], critic.compute_values(data)[mask])
    assert values.shape == mask.shape
    with pytest.raises(
        ConfigError,
        match=r"_forward_micro_batch\(\) answers without gradient here: .* update_critic\(\)",
    ):
        critic._forward_micro_batch(tensors)
    critic.engine.close()
    with pytest.raises(
        ConfigError, match="Derived overrides _forward_micro_batch, which training no longer calls"
    ):

        class Derived(DataParallelPPOCritic):
            def _forward_micro_batch(self, micro_batch):  # type: ignore[no-untyped-def]
                raise NotImplementedError
