"""Which modules an adapter lies beside and what it begins with, fresh or from a directory in the format of HF PEFT.

The one module that imports peft, whose configuration decides; what is computed is in ``adapter_layers``.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from peft import LoraConfig, TaskType
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import load_file
from torch import Tensor, nn

from temper_engine_api.errors import CapabilityError, ConfigError, WeightError
from temper_engine_api.specs import LoraSpec, ModelSpec
from temper_engine_api.weights import WeightEntry, check_weight_entries
from temper_engine_megatron.adapter.linear_adapters import LoraSettings
from temper_engine_megatron.huggingface.weight_names import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    PEFT_PREFIX,
    peft_expert_prefix,
)

_NOT_OFFERED = (
    "rank_pattern",
    "alpha_pattern",
    "lora_bias",
    "layer_replication",
    "trainable_token_indices",
    "use_qalora",
    "fan_in_fan_out",
)
"""Of PEFT's configuration: what would be computed otherwise."""
_INSIDE_EXPERTS = frozenset({"gate_proj", "up_proj", "down_proj", "gate_up_proj"})
"""What files call the matrices of one expert; transformers keeps those of a layer in joined tensors."""
_OLD_LAYOUT = ("adapter_checkpoint", "mp_rank_*_adapter.pt", "dist_ckpt")
"""What the private layouts of other systems leave in an adapter's directory."""


class AdapterPlan:
    """Which Hugging Face modules are adapted or trained whole, and how; known before the model is built."""

    def __init__(
        self,
        spec: LoraSpec,
        *,
        model: ModelSpec,
        modules: tuple[str, ...],
        others: tuple[str, ...],
        joined: tuple[str, ...],
        head: str,
    ) -> None:
        """Decide.

        Args:
            spec: what is asked.
            model: of the engine.
            modules: Hugging Face modules that may have an adapter, in the order of the model.
            others: Hugging Face modules that have weights and may have none.
            joined: tensors in which transformers joins the matrices of experts, in the order of the model.
            head: the output layer's module.

        Raises:
            ConfigError: no module matches, or one that can't be adapted.
            CapabilityError: the directory holds another kind of adapter.
        """
        self.spec, self.head = spec, head
        self.config = (
            _fresh_config(spec, model=model)
            if spec.path is None
            else _saved_config(spec.path, dropout=spec.dropout)
        )
        asked = self.config.target_modules
        _refuse_experts(self.config, modules=modules, joined=joined)
        _refuse_unmatched(spec, names=(*modules, *others), kinds=_kinds(modules))
        self.experts = _chosen_of(self.config, joined)
        """Of the joined tensors those that are adapted."""
        if asked == "all-linear":
            self.targets = tuple(name for name in modules if not _is_excluded(self.config, name))
            self.config.target_modules = {name.rpartition(".")[2] for name in self.targets}
        else:
            self.targets = tuple(name for name in modules if _is_chosen(self.config, name))
            wrong = [name for name in others if _is_chosen(self.config, name)]
            if wrong:
                raise ConfigError(
                    f"lora.target_modules takes in {wrong[0]}, which can't have an adapter: only linear layers below the head can. "
                    "Name it in lora.exclude_modules, or train it whole through lora.modules_to_save."
                )
        if not self.targets and not self.experts:
            raise ConfigError(
                f"lora.target_modules {_told(asked)} names no linear layer of this model; it has {_told(_kinds(modules))}."
            )
        self.trains_head = self._trains_head((*modules, *others))
        scale = math.sqrt(self.config.r) if self.config.use_rslora else self.config.r
        self.settings = LoraSettings(
            rank=self.config.r,
            scale=self.config.lora_alpha / scale,
            dropout=spec.dropout,
            dora=bool(self.config.use_dora),
        )
        self._seed = model.seed

    def _trains_head(self, modules: tuple[str, ...]) -> bool:
        """PEFT names heads by every name that it knows; those that the model does not have mean nothing, unless they were asked for."""
        wanted = set(self.config.modules_to_save or ())
        found = {name for name in modules for asked in wanted if f".{name}".endswith(f".{asked}")}
        missing = {
            asked
            for asked in self.spec.modules_to_save
            if not any(f".{name}".endswith(f".{asked}") for name in modules)
        }
        if unknown := (found - {self.head}) | missing:
            raise ConfigError(
                f"lora.modules_to_save names {', '.join(sorted(unknown))}, but the Megatron engine trains only the output layer whole "
                f"({self.head}): leave out the others."
            )
        return self.head in found

    def description(self) -> dict[str, object]:
        """What adapter_config.json holds."""
        fields = {
            key: sorted(value) if isinstance(value, set) else value
            for key, value in self.config.to_dict().items()
        }
        described: dict[str, object] = json.loads(
            json.dumps(fields | {"inference_mode": True}, default=str)
        )
        return described

    def select_targets(self, modules: tuple[str, ...]) -> tuple[str, ...]:
        """The last parts of those of the modules that are adapted."""
        return tuple(name.rpartition(".")[2] for name in modules if name in self.targets)

    def select_expert_targets(self, module: str) -> tuple[str, ...]:
        """The last parts of the adapted tensors of one module with experts."""
        return tuple(
            name.rpartition(".")[2] for name in self.experts if name.rpartition(".")[0] == module
        )

    def peft_prefix(self, joined: str) -> str:
        """What PEFT puts before ``.lora_A`` for one of the joined tensors."""
        module, _, part = joined.rpartition(".")
        return peft_expert_prefix(module, part, joined=self.select_expert_targets(module))

    def tensors(
        self, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]
    ) -> dict[str, Tensor]:
        """What the adapter begins with, full tensors by PEFT name; magnitudes of a fresh DoRA are left out.

        Args:
            shapes: by PEFT name.
            read: full weights of the base, for what is trained whole.

        Raises:
            WeightError: the directory's tensors are not those that its configuration asks for.
        """
        if self.spec.path is not None:
            tensors = read_adapter_tensors(self.spec.path)
            _check_complete(shapes, tensors)
            return tensors
        fresh: dict[str, Tensor] = {}
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(
                self._seed
            )  # without the GPUs, whose streams go on as they were
            for stem in (
                *(PEFT_PREFIX + module for module in self.targets),
                *map(self.peft_prefix, self.experts),
            ):
                down, up = (f"{stem}.{part}.weight" for part in ("lora_A", "lora_B"))
                fresh[down], fresh[up] = _fresh_pair(shapes[down], shapes[up])
        for name in shapes.keys() - fresh.keys():
            if not name.endswith("lora_magnitude_vector"):
                fresh[name] = read(name.removeprefix(PEFT_PREFIX))
        return fresh


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
    folder = Path(path)
    if not (folder / ADAPTER_CONFIG).is_file():
        if any(next(folder.glob(pattern), None) for pattern in _OLD_LAYOUT):
            raise ConfigError(
                f"lora.path is {path!r}, which holds an adapter in another system's private layout: convert it with "
                f"`temper-migrate checkpoint {path} --to peft --out NEW` and set lora.path to NEW."
            )
        raise ConfigError(
            f"lora.path is {path!r}, which has no {ADAPTER_CONFIG}: name a directory in the format of Hugging Face PEFT."
        )
    kind = json.loads((folder / ADAPTER_CONFIG).read_text()).get("peft_type")
    if kind != "LORA":
        raise CapabilityError(
            f"the adapter in {path} is of type {kind}; only LORA can be trained here."
        )
    config = LoraConfig.from_pretrained(path)
    assert isinstance(config, LoraConfig)
    others = [name for name in _NOT_OFFERED if vars(config).get(name)] + (
        ["bias"] if config.bias != "none" else []
    )
    if others:
        raise CapabilityError(
            f"the adapter in {path} sets {', '.join(others)}, which the Megatron engine does not compute."
        )
    if config.target_parameters and (dropout > 0 or config.use_dora):
        setting = (
            f"lora.dropout is {dropout}" if dropout > 0 else f"the adapter in {path} is a DoRA"
        )
        raise ConfigError(
            f"{setting}, but PEFT has that beside linear layers only, and the adapter in {path} has target_parameters."
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


def _fresh_pair(down: tuple[int, ...], up: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """A and B as PEFT makes them, with the same draws: two linear layers, of which A is drawn anew and B set to 0."""
    first = nn.Linear(down[1], down[0], bias=False)
    second = nn.Linear(up[1], up[0], bias=False)
    nn.init.kaiming_uniform_(first.weight, a=math.sqrt(5))
    return first.weight.detach(), torch.zeros_like(second.weight)


def _is_chosen(config: LoraConfig, name: str) -> bool:
    # A match object or an "excluded" mark; only True and a match mean yes.
    found = check_target_module_exists(config, name)
    return bool(found)


def _is_excluded(config: LoraConfig, name: str) -> bool:
    excluded = config.exclude_modules
    if not excluded:
        return False
    probe = LoraConfig(target_modules=excluded if isinstance(excluded, str) else list(excluded))
    return bool(check_target_module_exists(probe, name))


def _refuse_experts(
    config: LoraConfig, *, modules: tuple[str, ...], joined: tuple[str, ...]
) -> None:
    """PEFT has no modules inside experts; of such names it makes target_parameters, with twice the rank where two matrices are joined."""
    asked = config.target_modules
    is_all = asked == "all-linear" and not config.target_parameters
    if joined and (
        is_all or (isinstance(asked, set | list | tuple) and _INSIDE_EXPERTS.intersection(asked))
    ):
        raise ConfigError(
            f"lora.target_modules is {_told(asked)}, which takes in what lies inside this model's experts: name in it modules of "
            f"{_told(_kinds(modules))}, and in lora.target_parameters the tensors of experts, of {_told(_tensors_of(joined))}."
        )


def _refuse_unmatched(spec: LoraSpec, *, names: tuple[str, ...], kinds: list[str]) -> None:
    """A name that nothing has, beside one that something has; PEFT would pass over it. A pattern of targets is refused by what it finds."""
    for key in ("target_modules", "exclude_modules"):
        asked: str | tuple[str, ...] = getattr(spec, key)
        if isinstance(asked, str):
            is_idle = (
                key == "exclude_modules"
                and asked
                and not any(re.fullmatch(asked, name) for name in names)
            )
            unmatched = [asked] if is_idle else []
        else:
            unmatched = [
                wanted
                for wanted in asked
                if not any(f".{name}".endswith(f".{wanted}") for name in names)
            ]
        if unmatched:
            raise ConfigError(
                f"lora.{key} names {', '.join(unmatched)}, but no layer of this model has that name: remove it, or take another; "
                f"it has {', '.join(kinds)}."
            )


def _chosen_of(config: LoraConfig, joined: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the joined tensors that the configuration names, by the ends of their names.

    Raises:
        ConfigError: it names others.
    """
    asked = config.target_parameters or ()
    unknown = sorted(
        name for name in asked if not any(f".{each}".endswith(f".{name}") for each in joined)
    )
    if unknown:
        raise ConfigError(
            f"lora.target_parameters names {', '.join(unknown)}, but only tensors of experts can be named, and this model has "
            f"{_told(_tensors_of(joined)) if joined else 'no experts'}."
        )
    return tuple(each for each in joined if any(f".{each}".endswith(f".{name}") for name in asked))


def _tensors_of(joined: tuple[str, ...]) -> list[str]:
    """The ends of their names, which all layers share."""
    return sorted({".".join(name.split(".")[-3:]) for name in joined})


def _kinds(modules: tuple[str, ...]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in modules})


def _told(target: object) -> str:
    return repr(sorted(target)) if isinstance(target, set | list | tuple) else repr(target)


def _check_complete(shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]) -> None:
    check_weight_entries(
        [
            WeightEntry(name=name, shape=shape, dtype=torch.float32)
            for name, shape in shapes.items()
        ],
        [
            WeightEntry(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype)
            for name, tensor in tensors.items()
        ],
    )
