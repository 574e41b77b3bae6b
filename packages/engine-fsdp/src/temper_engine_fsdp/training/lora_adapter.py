"""A low-rank adapter inside the model, through peft: made or continued, switched off, merged, exchanged in the format of HF PEFT.

The one module that imports peft. Outside it an adapter's tensors go by the names of an ``adapter_model.safetensors``.
"""

import json
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig, TaskType, inject_adapter_in_model
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from temper_engine_api.errors import CapabilityError, CheckpointError, ConfigError, WeightError
from temper_engine_api.specs import LoraSpec, ModelSpec
from temper_engine_api.weights import WeightEntry, check_complete
from temper_engine_fsdp.model.weight_names import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    PEFT_PREFIX,
    hf_name,
    is_adapter_parameter,
    peft_name,
)
from temper_engine_fsdp.runtime.numerics import fork_rng, restart_rng
from temper_engine_fsdp.sharding.sharded_parameter import ShardedParameters

_ADAPTER = "default"
"""What peft calls the one adapter."""
_COMPARED_FIELDS = ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern")
"""Fields that decide what the same tensors compute."""
_EXPERT_TENSORS = ("gate_up_proj", "down_proj")
"""Tensors of a module with experts, [experts, rows, columns], in which transformers joins their matrices."""


class LoraAdapter:
    """The adapter of one model; its parameters live in the model, and are asked for where they are needed, sharded or not."""

    def __init__(self, hf: PreTrainedModel, *, config: LoraConfig) -> None:
        self._config = config
        self._is_off = False
        self.has_replaced_base = False
        """Whether the model's weights are no longer those that the adapter was started on, so that checkpoints must hold them."""
        modules = dict(hf.named_modules())
        self._switchable = [
            m for m in modules.values() if isinstance(m, BaseTunerLayer | ModulesToSaveWrapper)
        ]
        self._linears = {
            name: module for name, module in modules.items() if isinstance(module, LoraLinear)
        }
        self._experts = {
            _expert_weight_name(name, module): (name, module)
            for name, module in _expert_wrappers(hf)
        }
        self._fully_trained = tuple(
            name for name, module in modules.items() if isinstance(module, ModulesToSaveWrapper)
        )

    @property
    def targets_experts(self) -> bool:
        """Whether it changes tensors of experts, and not linear layers alone."""
        return bool(self._experts)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """The base model alone inside; nested entries are harmless."""
        before = self._is_off
        self._set_disabled(is_off=True)
        try:
            yield
        finally:
            self._set_disabled(is_off=before)

    def _set_disabled(self, *, is_off: bool) -> None:
        self._is_off = is_off
        for module in self._switchable:
            # enable_adapters() would change requires_grad too, which FSDP reads only when it first gathers a parameter.
            module._disable_adapters = is_off

    def make_module_getter(self, module: nn.Module) -> Callable[[], nn.Module]:
        """What stands for a module of the model whenever it is asked: its trained copy, if it has one and the adapter is not disabled."""

        def get_module() -> nn.Module:
            if not isinstance(module, ModulesToSaveWrapper):
                return module
            module_in_use: nn.Module = (
                module.original_module if self._is_off else module.modules_to_save[_ADAPTER]
            )
            return module_in_use

        return get_module

    def merge_weight(self, name: str, weight: Tensor, *, trained: ShardedParameters) -> Tensor:
        """A weight with what the adapter does to it, in float32 arithmetic; itself while the adapter is disabled. Collective.

        Args:
            name: Hugging Face name of the weight.
            weight: it, full.
            trained: the adapter's parameters.
        """
        owner, _, kind = name.rpartition(".")
        if self._is_off:
            return weight
        if any(name.startswith(f"{whole}.") for whole in self._fully_trained):
            return _gather_tensor(PEFT_PREFIX + name, trained)
        if name in self._experts:
            return self._merge_experts(name, weight, trained=trained)
        if owner not in self._linears or kind != "weight":
            return weight
        down, up = (
            _gather_tensor(f"{PEFT_PREFIX}{owner}.{part}.weight", trained)
            for part in ("lora_A", "lora_B")
        )
        whole = torch.addmm(
            weight.float(), up.float(), down.float(), alpha=self._linears[owner].scaling[_ADAPTER]
        )
        magnitude = f"{PEFT_PREFIX}{owner}.lora_magnitude_vector"
        if magnitude in trained:
            # DoRA: each row has a trained length; arXiv:2402.09353, equation 5.
            whole *= (
                _gather_tensor(magnitude, trained).float() / torch.linalg.vector_norm(whole, dim=1)
            )[:, None]
        return whole

    def _merge_experts(self, name: str, weight: Tensor, *, trained: ShardedParameters) -> Tensor:
        """Of the joined matrices of all experts: PEFT has A expert after expert, and in B the experts next to each other."""
        module_name, module = self._experts[name]
        down, up = (
            _gather_tensor(f"{PEFT_PREFIX}{module_name}.{part}.weight", trained).float()
            for part in ("lora_A", "lora_B")
        )
        down, up = (
            down.unflatten(0, (len(weight), -1)),
            up.unflatten(1, (-1, len(weight))).permute(2, 0, 1),
        )
        return torch.baddbmm(weight.float(), up, down, alpha=module.scaling[_ADAPTER])

    def export(self, trained: ShardedParameters) -> tuple[dict[str, object], dict[str, Tensor]]:
        """What PEFT's two files hold: the configuration, and full float32 tensors. Collective."""
        return self.peft_config(), {name: _gather_tensor(name, trained).float() for name in trained}

    def peft_config(self) -> dict[str, object]:
        """What adapter_config.json holds."""
        fields = {
            key: sorted(value) if isinstance(value, set) else value
            for key, value in self._config.to_dict().items()
        }
        described: dict[str, object] = json.loads(
            json.dumps(fields | {"inference_mode": True}, default=str)
        )
        return described

    @torch.no_grad()
    def load(
        self,
        config: Mapping[str, object],
        tensors: Mapping[str, Tensor],
        *,
        trained: ShardedParameters,
    ) -> None:
        """Replace the adapter's parameters by these full tensors. No communication.

        Raises:
            ConfigError: with that configuration the same tensors would compute something else.
            WeightError: a name is missing or unexpected, or a shape differs; nothing has been loaded then.
        """
        own_config = self.peft_config()
        for key in _COMPARED_FIELDS:
            if config.get(key, own_config[key]) != own_config[key]:
                raise ConfigError(
                    f"the adapter to load has {key} {config[key]}, but this engine has "
                    f"{own_config[key]}: configure lora like it."
                )
        _check_complete({name: parameter.shape for name, parameter in trained.items()}, tensors)
        for name, parameter in trained.items():
            parameter.local_shard().copy_(parameter.take_shard(tensors[name]))

    def check_base_weights(self, has_weights: bool, *, directory: str) -> None:
        """Before a checkpoint is read: whether it holds the weights around the adapter too.

        Raises:
            CheckpointError: it does not, but those that it was made on were replaced here.
        """
        if self.has_replaced_base and not has_weights:
            raise CheckpointError(
                f"the checkpoint in {directory} holds an adapter alone, but load_weights() has "
                "replaced the weights that this engine "
                "started with: load the checkpoint in a new engine."
            )
        self.has_replaced_base = has_weights


def attach_adapter(hf: PreTrainedModel, *, spec: LoraSpec, model: ModelSpec) -> LoraAdapter:
    """Put an adapter into the model, fresh or from a directory; afterwards only its parameters need a gradient.

    Raises:
        ConfigError: no module matches, or one that packed training with a fused head can't adapt.
        CapabilityError: the directory holds another kind of adapter.
        WeightError: the directory's tensors are not those that its configuration asks for.
    """
    config = (
        _fresh_config(spec, model=model)
        if spec.path is None
        else _saved_config(spec.path, dropout=spec.dropout)
    )
    _check_target_names(hf, spec=spec)
    requested, expert_targets = config.target_modules, tuple(config.target_parameters or ())
    head = hf.get_output_embeddings()
    if requested == "all-linear" and config.target_parameters:
        # PEFT would take in all tensors of experts, whichever are named, and with another rank.
        config.target_modules = {
            name
            for name, module in hf.named_modules()
            if isinstance(module, nn.Linear) and module is not head
        }
    with fork_rng(model.seed), warnings.catch_warnings():
        # What peft warns of (tied embeddings, modules that are not there) is refused below.
        warnings.simplefilter("ignore")
        try:
            inject_adapter_in_model(config, hf)
        except ValueError as error:
            named = f"target_modules {_format_target(requested)}" + (
                f" with lora.target_parameters {', '.join(expert_targets)}"
                if expert_targets
                else ""
            )
            raise ConfigError(
                f"lora.{named} can't be adapted in {type(hf).__name__}: {error}"
            ) from error
        _initialize(hf, seed=model.seed)
    _refuse_unsupported(hf, spec=spec, head=head)
    _check_target_parameters(hf, requested=expert_targets)
    config.target_modules = _short_target_names(hf) if requested == "all-linear" else requested
    adapter = LoraAdapter(hf, config=config)
    if spec.path is not None:
        _set_initial_tensors(hf, read_adapter_tensors(spec.path))
    return adapter


def _check_target_names(hf: PreTrainedModel, *, spec: LoraSpec) -> None:
    """PEFT passes over a name that no module has, as long as another one is found; a pattern of targets that finds none it refuses."""
    names = [f".{name}" for name, _ in hf.named_modules()]
    for key in ("target_modules", "exclude_modules"):
        requested: str | tuple[str, ...] = getattr(spec, key)
        if isinstance(requested, str):
            is_unused = (
                key == "exclude_modules"
                and requested
                and not any(re.fullmatch(requested, name[1:]) for name in names)
            )
            unmatched = [requested] if is_unused else []
        else:
            unmatched = [
                name_suffix
                for name_suffix in requested
                if not any(name.endswith(f".{name_suffix}") for name in names)
            ]
        if unmatched:
            raise ConfigError(
                f"lora.{key} names {', '.join(unmatched)}, which {type(hf).__name__} does not have."
            )


def _initialize(hf: nn.Module, *, seed: int) -> None:
    """First values, those that peft draws: it gives an adapter no memory where the layer that it is put beside has none yet."""
    restart_rng(seed)
    for layer in _in_peft_order(hf):
        for part in (layer.lora_A, layer.lora_B):
            if any(parameter.is_meta for parameter in part.parameters()):
                part.to_empty(device="cpu")
            # Making them draws numbers, too.
            part[_ADAPTER].reset_parameters()
        layer.reset_lora_parameters(_ADAPTER, init_lora_weights=True)


def _in_peft_order(hf: nn.Module) -> Iterator[LoraLinear | ParamWrapper]:
    """As peft puts them in: linear layers, then tensors of experts, of one module the one that lies inside first."""
    yield from (module for module in hf.modules() if isinstance(module, LoraLinear))
    nests: dict[str, list[ParamWrapper]] = {}
    for name, wrapper in _expert_wrappers(hf):
        nests.setdefault(name.replace(".base_layer", ""), []).append(wrapper)
    for nest in nests.values():
        yield from reversed(nest)


def requires_loaded_weights(spec: LoraSpec, *, model: ModelSpec) -> bool:
    """Whether an adapter can't be put into a model whose weights come later: DoRA measures them, and modules trained whole copy them.

    Raises:
        ConfigError: there is no adapter in the directory.
        CapabilityError: the directory holds another kind of adapter.
    """
    config = (
        _fresh_config(spec, model=model)
        if spec.path is None
        else _saved_config(spec.path, dropout=spec.dropout)
    )
    return bool(
        config.use_dora
        or config.modules_to_save
        or config.init_lora_weights not in (True, False, "gaussian")
    )


def _fresh_config(spec: LoraSpec, *, model: ModelSpec) -> LoraConfig:
    is_language_model = model.model_type == "language_model"
    # The head of a value or reward model starts from random numbers: it can only be trained whole.
    whole = {*spec.modules_to_save} if is_language_model else {*spec.modules_to_save, "score"}
    excluded = (
        spec.exclude_modules
        if isinstance(spec.exclude_modules, str)
        else sorted({*spec.exclude_modules, *whole})
    )
    return LoraConfig(
        task_type=TaskType.CAUSAL_LM if is_language_model else TaskType.TOKEN_CLS,
        base_model_name_or_path=model.path,
        r=spec.rank,
        lora_alpha=int(spec.alpha)
        if spec.alpha is not None and float(spec.alpha).is_integer()
        else spec.alpha,
        lora_dropout=spec.dropout,
        target_modules=spec.target_modules
        if isinstance(spec.target_modules, str)
        else list(spec.target_modules),
        exclude_modules=excluded or None,
        # engine-api 0.1.1 and those before do not have the field.
        target_parameters=list(getattr(spec, "target_parameters", ())) or None,
        modules_to_save=sorted(whole) or None,
        use_rslora=spec.rslora,
        use_dora=spec.dora,
    )


def _saved_config(path: str, *, dropout: float) -> LoraConfig:
    file = Path(path, ADAPTER_CONFIG)
    if not file.is_file():
        raise ConfigError(
            f"lora.path is {path!r}, which has no {ADAPTER_CONFIG}: name a directory in the format "
            "of Hugging Face PEFT."
        )
    kind = json.loads(file.read_text()).get("peft_type")
    if kind != "LORA":
        raise CapabilityError(
            f"the adapter in {path} is of type {kind}; only LORA can be trained here."
        )
    config = LoraConfig.from_pretrained(path)
    assert isinstance(config, LoraConfig)
    if config.target_parameters and dropout > 0:
        raise ConfigError(
            f"lora.dropout is {dropout}, but the adapter in {path} has target_parameters, for "
            "which PEFT has no dropout: set it to 0."
        )
    config.inference_mode = False
    config.lora_dropout = dropout
    return config


def read_adapter_tensors(path: str) -> dict[str, Tensor]:
    """The tensors of a directory in the format of HF PEFT, by name.

    Raises:
        WeightError: it has none as safetensors.
    """
    file = Path(path, ADAPTER_WEIGHTS)
    if not file.is_file():
        raise WeightError(
            f"the adapter in {path} has no {ADAPTER_WEIGHTS}: save it as safetensors."
        )
    return load_file(file)


def _refuse_unsupported(hf: PreTrainedModel, *, spec: LoraSpec, head: nn.Module | None) -> None:
    modules = dict(hf.named_modules())
    for name, module in modules.items():
        if isinstance(module, ParamWrapper):
            continue
        if isinstance(module, BaseTunerLayer) and (
            not isinstance(module, LoraLinear) or module.base_layer is head
        ):
            raise ConfigError(
                f"lora.target_modules takes in {name}, which can't have an adapter: only linear "
                "layers below the head can. "
                "Name it in lora.exclude_modules, or train it whole through lora.modules_to_save."
            )
        is_embedding = isinstance(module, ModulesToSaveWrapper) and module.original_module in (
            head,
            hf.get_input_embeddings(),
        )
        if is_embedding and hf.config.tie_word_embeddings:
            raise ConfigError(
                f"lora.modules_to_save names {name}, which this model ties to its other embedding: "
                "take an untied model."
            )
    module_in_use = {
        name for name, module in modules.items() if isinstance(module, ModulesToSaveWrapper)
    }
    missing = [
        name_suffix
        for name_suffix in spec.modules_to_save
        if not any(f".{name}".endswith(f".{name_suffix}") for name in module_in_use)
    ]
    if missing:
        raise ConfigError(
            f"lora.modules_to_save names {', '.join(missing)}, which {type(hf).__name__} does not "
            "have."
        )


def _expert_wrappers(hf: nn.Module) -> Iterator[tuple[str, ParamWrapper]]:
    """What adapts tensors instead of modules, by its own name."""
    for name, module in hf.named_modules():
        if isinstance(module, ParamWrapper):
            yield name, module


def _expert_weight_name(name: str, module: ParamWrapper) -> str:
    return hf_name(f"{name}.base_layer.{module.parameter_name}")


def _check_target_parameters(hf: nn.Module, *, requested: Collection[str]) -> None:
    """Of tensors those of experts can be adapted, and only by their own names: other names would give them another rank."""
    module_in_use = {_expert_weight_name(name, module) for name, module in _expert_wrappers(hf)}
    wrong = sorted(
        name for name in module_in_use if name.rpartition(".experts.")[2] not in _EXPERT_TENSORS
    )
    if module_in_use and not requested:
        raise ConfigError(
            "lora.target_modules takes in what lies inside this model's experts: name in it linear "
            "layers around them, and in "
            "lora.target_parameters the tensors of experts, such as "
            f"{' and '.join(f'mlp.experts.{part}' for part in _EXPERT_TENSORS)}."
        )
    unknown = sorted(
        name
        for name in requested
        if not any(f".{each}".endswith(f".{name}") for each in module_in_use)
    )
    if wrong or unknown:
        raise ConfigError(
            f"lora.target_parameters names {', '.join(wrong or unknown)}, but only tensors of "
            "experts can be named, and only ones that "
            f"this model has; {' and '.join(f'mlp.experts.{part}' for part in _EXPERT_TENSORS)} "
            "where it is one with experts."
        )


def _short_target_names(hf: PreTrainedModel) -> set[str]:
    """What to call the layers that have an adapter: by their last part, where no other module has the same."""
    is_adapted = {
        name: isinstance(module, LoraLinear)
        for name, module in hf.named_modules()
        if isinstance(module, nn.Linear | LoraLinear)
        and ".lora_" not in name
        and ".base_layer" not in name
    }
    others = {name.rpartition(".")[2] for name, adapted in is_adapted.items() if not adapted}
    adapted = [name for name, has in is_adapted.items() if has]
    return {
        name if name.rpartition(".")[2] in others else name.rpartition(".")[2] for name in adapted
    }


def _format_target(target: object) -> str:
    return repr(sorted(target)) if isinstance(target, set | list | tuple) else repr(target)


def _gather_tensor(name: str, trained: ShardedParameters) -> Tensor:
    return trained[name].gather(trained[name].local_shard())


@torch.no_grad()
def _set_initial_tensors(hf: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
    """Set the adapter of a model that is not sharded yet."""
    targets = {
        peft_name(name): parameter
        for name, parameter in hf.named_parameters()
        if is_adapter_parameter(name)
    }
    _check_complete({name: parameter.shape for name, parameter in targets.items()}, tensors)
    for name, parameter in targets.items():
        parameter.copy_(tensors[name])


def _check_complete(shapes: Mapping[str, torch.Size], tensors: Mapping[str, Tensor]) -> None:
    check_complete(
        [
            WeightEntry(name=name, shape=tuple(shape), dtype=torch.float32)
            for name, shape in shapes.items()
        ],
        [
            WeightEntry(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype)
            for name, tensor in tensors.items()
        ],
    )
