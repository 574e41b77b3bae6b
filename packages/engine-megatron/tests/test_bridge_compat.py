"""Test that the bridge is imported without needless packages and maps all parameters."""

import ast
import dataclasses
import importlib.metadata
import importlib.util
import platform
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from megatron.core import optimizer as core_optimizer
from packaging.requirements import Requirement
from transformers import AutoConfig

from temper_engine_api.errors import CapabilityError, ConfigError
from temper_engine_api.specs import ModelSpec
from temper_engine_megatron.bridge_compat import (
    VERSION_PAIRS,
    BridgeTranslation,
    WeightMapping,
    find_installed_pair,
)
from temper_engine_megatron.bridge_compat.bridge_translation import MISSING_COMPONENTS
from temper_engine_megatron.bridge_compat.supported_versions import BRIDGE, CORE
from temper_engine_megatron.huggingface.huggingface_model import load_hf_config
from temper_engine_megatron.model.transformer_settings import OWN_FIELDS

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}


def config(model_type="qwen2", **fields):
    return AutoConfig.for_model(model_type, **{**SIZES, **fields})


def test_stubs_are_not_in_sys_modules():
    absent = {
        name for name in ("transformer_engine", "triton") if importlib.util.find_spec(name) is None
    }
    BridgeTranslation(config())
    from megatron.core.extensions.transformer_engine import HAVE_TE

    assert not {name for name in sys.modules if name.partition(".")[0] in absent}
    assert ("transformer_engine" in absent) != HAVE_TE


def unload_bridge(monkeypatch):
    for name in [
        name
        for name in sys.modules
        if name == "megatron.bridge" or name.startswith("megatron.bridge.")
    ]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("is_distributed", [False, True])
def test_optimizer_is_torchs_even_if_megatron_found_another(start, monkeypatch, is_distributed):
    # Like the Adam of TransformerEngine or Apex, which keeps the update count elsewhere than torch.
    monkeypatch.setattr(core_optimizer, "USING_PYTORCH_OPTIMIZER", False)
    monkeypatch.setattr(core_optimizer, "Adam", OtherAdam)
    start(distributed_optimizer=is_distributed)
    assert not core_optimizer.USING_PYTORCH_OPTIMIZER, (
        "the engine must restore Megatron's choice for other users in this process"
    )


class OtherAdam(torch.optim.Optimizer):
    """An AdamW of another library."""

    def __init__(self, *_, **__):
        raise AssertionError("the engine can't read the state of this optimizer")


def test_error_for_a_missing_bridge_has_the_pip_command(monkeypatch):
    expected = f"pip install --no-deps {BRIDGE}=={find_installed_pair().tested[BRIDGE]}"
    unload_bridge(monkeypatch)
    pretend_installed(monkeypatch, core=importlib.metadata.version(CORE), bridge=None)
    monkeypatch.setitem(sys.modules, "megatron.bridge", None)
    with pytest.raises(
        ConfigError, match="needs Megatron-Bridge, which is not installed"
    ) as caught:
        BridgeTranslation(config())
    assert str(caught.value).endswith(expected)


def pretend_installed(monkeypatch, *, core, bridge, python=None):
    """Pretend that these versions are installed; None is for a missing distribution."""
    versions = {CORE: core, BRIDGE: bridge}
    real = importlib.metadata.version

    def version(name):
        if versions.get(name, "") is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name] if name in versions else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    if python is not None:
        monkeypatch.setattr(platform, "python_version", lambda: python)


class FailingFinder:
    """An import finder that raises an error for one package."""

    def __init__(self, name, error):
        self.name, self.error = name, error

    def find_spec(self, name, path=None, target=None):
        if name == self.name:
            raise self.error


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'omegaconf'", name="omegaconf"),
        RuntimeError("the package is empty"),
    ],
    ids=repr,
)
def test_bridge_that_fails_to_import_is_not_reported_as_missing(monkeypatch, error):
    unload_bridge(monkeypatch)
    monkeypatch.setattr(
        sys, "meta_path", [FailingFinder("megatron.bridge.models", error), *sys.meta_path]
    )
    with pytest.raises(ConfigError, match="is installed, but importing it failed with") as caught:
        BridgeTranslation(config())
    assert str(error) in str(caught.value)
    assert "not installed" not in str(caught.value)


@pytest.mark.parametrize(
    ("core", "bridge", "python", "command"),
    [
        ("0.16.1", "0.6.2", "3.12.1", "megatron-bridge==0.3.1"),
        ("0.19.2", "0.3.1", "3.12.1", "megatron-bridge==0.6.2"),
        ("0.17.1", "0.3.1", "3.11.2", "megatron-core==0.16.1"),
        ("0.17.1", "0.6.2", "3.12.1", "megatron-core==0.19.2"),
        ("0.18.0", "0.5.0", "3.11.2", "megatron-core==0.16.1 megatron-bridge==0.3.1"),
        ("0.18.0", "0.5.0", "3.12.1", "megatron-core==0.19.2 megatron-bridge==0.6.2"),
        # The newer bridge supports Python 3.12 only.
        ("0.19.2", "0.3.1", "3.13.0", "megatron-core==0.16.1"),
    ],
)
def test_unsupported_pair_is_refused_with_the_smallest_change(
    monkeypatch, core, bridge, python, command
):
    pretend_installed(monkeypatch, core=core, bridge=bridge, python=python)
    with pytest.raises(ConfigError, match=f"{CORE} is {core} and {BRIDGE} {bridge}, but") as caught:
        BridgeTranslation(config())
    assert str(caught.value).endswith(f": pip install --no-deps {command}")


@pytest.mark.parametrize(
    ("core", "bridge", "python"),
    [("0.16.1", "0.3.1", "3.11.2"), ("0.16.1", "0.3.1", "3.12.1"), ("0.19.2", "0.6.2", "3.12.1")],
)
def test_supported_pair_is_accepted(monkeypatch, core, bridge, python):
    pretend_installed(monkeypatch, core=core, bridge=bridge, python=python)
    assert find_installed_pair().tested == {CORE: core, BRIDGE: bridge}


def test_requirements_of_the_package_equal_the_supported_pairs():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    required = [Requirement(line) for line in project["dependencies"] if line.startswith(CORE)]
    for python, pairs in (
        ("3.11", VERSION_PAIRS[:1]),
        ("3.12", VERSION_PAIRS),
        ("3.13", VERSION_PAIRS[:1]),
    ):
        (requirement,) = (
            line
            for line in required
            if line.marker is not None and line.marker.evaluate({"python_version": python})
        )
        for version in (
            "0.15.3",
            "0.16.0",
            "0.16.1",
            "0.16.4",
            "0.17.1",
            "0.18.0",
            "0.19.0",
            "0.19.2",
            "0.19.7",
            "0.20.0",
        ):
            assert requirement.specifier.contains(version) == any(
                pair.core.contains(version) for pair in pairs
            ), (python, version)


def parse_source(module):
    """Parse the source of a module without importing it."""
    root, _, path = module.partition(".")
    (file,) = (
        path_of_module
        for folder in sys.modules[root].__path__
        if (path_of_module := Path(folder, f"{path.replace('.', '/')}.py")).exists()
    )
    return ast.parse(file.read_text())


def test_stubbed_packages_are_still_imported_unconditionally():
    # If this fails, upstream has made an import conditional: remove it from the version pair.
    BridgeTranslation(config())
    trees = {
        "transformer_engine": parse_source("megatron.bridge.peft.lora_layers"),
        "triton": parse_source(
            "megatron.core.inference.contexts.attention_context.triton.tensor_ops"
        ),
    }
    names = {
        name
        for name, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.Import)
        and any(alias.name.partition(".")[0] == name for alias in node.names)
    }
    assert names == find_installed_pair().unused_package_importers.keys()


def test_router_still_lacks_the_name_that_is_added():
    BridgeTranslation(config())
    stored = {
        node.id
        for node in ast.walk(parse_source("megatron.core.transformer.moe.moe_utils"))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    assert (
        "te_general_gemm" not in stored
    ) == find_installed_pair().router_needs_transformer_engine


def test_rotary_base_is_set_only_while_the_bridge_does_not_read_it(monkeypatch):
    hf_config = config(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert BridgeTranslation(hf_config).transformer_config.rotary_base == 5e5
    pair = dataclasses.replace(find_installed_pair(), ignores_rope_parameters=False)
    monkeypatch.setattr(
        "temper_engine_megatron.bridge_compat.bridge_translation.find_installed_pair", lambda: pair
    )
    assert (
        BridgeTranslation(hf_config).transformer_config.rotary_base != 5e5
    ) == find_installed_pair().ignores_rope_parameters


def test_every_field_that_the_engine_sets_exists_in_megatron(start):
    settings = start()._components.runner._chunks.transformer_config
    fields = {field.name for field in dataclasses.fields(settings)}
    untouched = BridgeTranslation(config()).transformer_config
    untouched.finalize()
    assert vars(settings).keys() - vars(untouched).keys() - fields == OWN_FIELDS


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama"])
def test_parameters_of_a_dense_layer_have_mappings(model_type):
    translation = BridgeTranslation(config(model_type))
    layer = "decoder.layers.1."
    assert translation.find_mapping(layer + "input_layernorm.weight").names == (
        "model.layers.1.input_layernorm.weight",
    )
    assert translation.find_mapping(layer + "pre_mlp_layernorm.weight").names == (
        "model.layers.1.post_attention_layernorm.weight",
    )
    assert translation.find_mapping(layer + "self_attention.linear_qkv.weight").kind == "qkv"
    assert translation.find_mapping(layer + "mlp.linear_fc1.weight") == WeightMapping(
        kind="gated",
        names=("model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"),
    )
    with pytest.raises(CapabilityError, match="has no mapping for nonesuch"):
        translation.find_mapping("nonesuch")


def test_split_qkv_is_the_inverse_of_join_qkv():
    translation = BridgeTranslation(config())
    draw = torch.Generator().manual_seed(0)
    parts = [torch.randn(rows, 32, generator=draw) for rows in (32, 16, 16)]
    again = translation.split_qkv(translation.join_qkv(parts))
    assert all(torch.equal(part, back) for part, back in zip(parts, again, strict=True))
    # Four query heads and two key heads of 8 rows: each key follows its two queries.
    assert torch.equal(translation.join_qkv(parts)[16:24], parts[1][:8])


@pytest.mark.parametrize("family", MISSING_COMPONENTS)
def test_family_is_refused_with_what_the_engine_lacks(family):
    with pytest.raises(
        CapabilityError, match=rf"lacks {MISSING_COMPONENTS[family]}: use the FSDP engine"
    ):
        BridgeTranslation(AutoConfig.for_model(family))


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl", "qwen3_5"])
def test_vision_language_model_is_refused_with_its_encoder(family):
    with pytest.raises(CapabilityError, match="has an encoder of images: use the FSDP engine"):
        BridgeTranslation(AutoConfig.for_model(family))


def test_unsupported_architecture_is_refused_by_name():
    with pytest.raises(CapabilityError, match="GPT2LMHeadModel"):
        BridgeTranslation(AutoConfig.for_model("gpt2"))


def test_lists_of_an_architecture_reach_the_config():
    fields = {"model_type": "qwen3", "num_hidden_layers": 1, "layer_types": ("full_attention",)}
    assert load_hf_config(ModelSpec(architecture=fields)).layer_types == ["full_attention"]
