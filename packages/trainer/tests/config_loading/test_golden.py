"""Test that configurations of released versions keep their values, or name the keys to rename."""

from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from temper_engine_api.errors import ConfigError
from temper_trainer.config.removed_keys import rename_settings
from temper_trainer.config_loading import load
from temper_trainer.config_loading.schema import flatten

FOLDER = Path(__file__).parents[1] / "golden"
GOLDEN = sorted(FOLDER.glob("*/*/config.yaml"))


@pytest.mark.parametrize("file", GOLDEN, ids=lambda file: f"{file.parts[-3]}-{file.parts[-2]}")
def test_released_configuration_has_the_same_values_under_the_new_keys(
    file: Path, tmp_path: Path
) -> None:
    text = file.read_text()
    released = yaml.safe_load(text)
    defaults = released.pop("defaults")
    written = rename_settings(flatten(released))
    tree = OmegaConf.create({"defaults": defaults})
    for key, value in written.items():
        OmegaConf.update(tree, key, value, force_add=True)
    # The first line marks the file as that of a run, in which every value is written out.
    first_line = text.partition("\n")[0]
    (tmp_path / "config.yaml").write_text(f"{first_line}\n{OmegaConf.to_yaml(tree)}")
    now = flatten(load([], config_dir=str(tmp_path), config_name="config").resolved)
    changed = {
        key: (value, now.get(key))
        for key, value in written.items()
        if now.get(key, "is gone") != value
    }
    assert changed == {}


@pytest.mark.parametrize(
    ("run", "num_engines"), [("gsm8k_grpo", 1), ("gsm8k_ppo", 2), ("gsm8k_sft", 1)]
)
def test_configuration_of_0_1_is_refused_with_the_new_name_of_each_key(
    run: str, num_engines: int
) -> None:
    folder = FOLDER / "0.1.0" / run
    with pytest.raises(ConfigError) as caught:
        load([], config_dir=str(folder), config_name="config")
    lines = str(caught.value).splitlines()
    # The offload policy has five keys, the policy loss ten, the estimator four, distillation five,
    # the preference loss two, each of two controllers two, and one is of the rewards. Each source
    # of files has its kind and three keys of other sources. Up to 25 are listed, then their number.
    num_sources = 1 if run == "gsm8k_sft" else 2
    num_keys = 5 * num_engines + 10 + 4 + 5 + 2 + 2 * 2 + 1 + 4 * num_sources
    if num_keys > 25:
        assert str(num_keys - 25) in lines.pop()
    assert len(lines) == min(num_keys, 25)
    # A reward became an objective of its own, so this key has no new name.
    others = [line for line in lines if not line.startswith("distillation.apply_as was removed")]
    assert len(others) >= len(lines) - 1
    foreign = [line for line in others if "is a setting of" in line]
    assert len(foreign) == 3 * num_sources
    others = [line for line in others if line not in foreign]
    assert all("was renamed in 0.2 to" in line for line in others)
    assert (
        "algorithm.cov_share was renamed in 0.2 to algorithm.policy_loss.fraction; its values mean "
        f"the same. Write the new name. (set by: run {folder / 'config.yaml'})"
    ) in lines
    assert any(
        line.startswith(
            "actor.engine.residency.offload_parameters was renamed in 0.2 to "
            "actor.engine.offload.parameters;"
        )
        for line in lines
    )
