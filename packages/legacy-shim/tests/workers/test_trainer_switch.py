"""``temper-train use_legacy_worker_impl=enable``.

Whole small runs whose roles are the deprecated workers.
"""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from temper_engine_api.errors import CapabilityError, ConfigError
from temper_trainer.config_loading import load, write_resolved
from temper_trainer.loops import train

ray = pytest.importorskip(
    "ray", reason="Ray is not installed: pip install './packages/trainer[ray]'"
)

SMALL = (
    "experiment=quickstart",
    "warm_start=null",
    "actor.engine.model.architecture.hidden_size=32",
    "actor.engine.model.architecture.intermediate_size=64",
    "actor.engine.model.architecture.num_hidden_layers=1",
    "data.train.max_rows=32",
    "data.eval=null",
    "batching.prompts_per_step=4",
    "algorithm.group_size=4",
    "run.total_steps=3",
    "run.table_every=0",
    "run.num_threads=1",
    "run.save_model=false",
    "run.report=false",
    "run.trackers=[jsonl]",
    "reward.function=random_rewards:fraction_of_even",
)


@pytest.fixture(autouse=True)
def rewards_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def run(directory: Path, *overrides: str) -> list[dict[str, float]]:
    loaded = load([*SMALL, f"run.dir={directory}", *overrides])
    train(
        loaded.config,
        digest=loaded.digest,
        write_config=lambda folder: write_resolved(loaded, folder),
    )
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["phase"] == "rl"]


def test_with_one_micro_batch_old_workers_train_as_the_engine_path_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # One micro-batch an update and no decay: the old numerics have nothing to differ in. Any slip
    # in data, masks or rates would show.
    two = ("batching.num_mini_batches=2", "algorithm.entropy_coef=0.001")
    new = run(tmp_path / "new", *two)
    with caplog.at_level(logging.WARNING):
        old = run(tmp_path / "old", *two, "use_legacy_worker_impl=enable")
    assert any(
        "ActorRolloutRefWorker is deprecated since" in record.message for record in caplog.records
    )
    for name in ("actor/grad_norm", "actor/lr", "rollout/tokens", "reward/mean", "actor/loss"):
        assert [row[name] for row in old] == pytest.approx(
            [row[name] for row in new], rel=2e-3, abs=1e-5
        ), name
    assert old[0]["actor/grad_norm"] == pytest.approx(new[0]["actor/grad_norm"], rel=1e-5)
    assert {"actor/pg_clipfrac", "actor/ppo_kl", "actor/entropy"} <= old[0].keys()


def test_with_several_micro_batches_the_old_mean_shows(tmp_path: Path) -> None:
    split = ("batching.max_tokens=140", "run.total_steps=1")
    new = run(tmp_path / "new", *split)
    old = run(tmp_path / "old", *split, "use_legacy_worker_impl=true")
    assert old[0]["rollout/tokens"] == new[0]["rollout/tokens"]
    assert old[0]["actor/grad_norm"] != pytest.approx(new[0]["actor/grad_norm"], rel=1e-3)


@pytest.mark.bitwise
def test_critic_and_reference_are_deprecated_workers_too_and_the_run_resumes(
    tmp_path: Path,
) -> None:
    ppo = (
        "algorithm=ppo",
        "ref=frozen",
        "algorithm.kl_loss_coef=0.01",
        "use_legacy_worker_impl=enable",
        "run.save_every=1",
    )
    full = run(tmp_path / "whole", *ppo, "run.total_steps=2")
    run(tmp_path / "parts", *ppo, "run.total_steps=1")
    parts = run(tmp_path / "parts", *ppo, "run.total_steps=2", "run.resume=auto")
    assert {"critic/vf_clipfrac", "value/explained_variance", "actor/kl_loss"} <= full[0].keys()
    assert parts[-1]["actor/grad_norm"] == full[-1]["actor/grad_norm"]
    assert parts[-1]["critic/grad_norm"] == full[-1]["critic/grad_norm"]


def test_what_the_old_losses_can_not_express_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="compute with another divisor"):
        run(
            tmp_path / "run",
            "use_legacy_worker_impl=enable",
            "algorithm.aggregation=sequence_mean_token_sum_norm",
            "algorithm.horizon=27",
        )
    assert issubclass(CapabilityError, Exception)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import os

    monkeypatch.setenv(
        "PYTHONPATH",
        os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
    )
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


# Nightly: test_ray_actors.py runs the old workers as actors.
@pytest.mark.nightly
@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
def test_as_ray_actors_the_old_workers_give_the_numbers_of_one_process(tmp_path: Path) -> None:
    enabled = ("use_legacy_worker_impl=enable", "run.total_steps=2")
    inline = run(tmp_path / "inline", *enabled)
    on_ray = run(tmp_path / "ray", *enabled, "runtime.kind=ray", "runtime.cpus_per_worker=0.5")
    assert [row["actor/grad_norm"] for row in on_ray] == [row["actor/grad_norm"] for row in inline]
