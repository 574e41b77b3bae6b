"""The oracle: a complete engine in plain torch, float32, one process, one sequence at a time.

Other engines are compared with it, so it is written to be read: nothing is packed, chunked, sharded
or fused. Its gradients for a full mini-batch are also the expected sum across any number of data-
parallel ranks.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    PreTrainedModel,
)

from temper_engine_api.batch import PackedBatch, SequenceBatch
from temper_engine_api.capabilities import Capability
from temper_engine_api.conformance.inputs.tiny_adapters import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    save_adapter,
)
from temper_engine_api.conformance.inputs.tiny_models import get_auto_class
from temper_engine_api.conformance.oracle.oracle_adapter import OracleAdapter
from temper_engine_api.conformance.oracle.oracle_head import compute_sequence_outputs, join_outputs
from temper_engine_api.conformance.oracle.oracle_names import FileLayout
from temper_engine_api.conformance.oracle.oracle_routers import (
    OracleConfig,
    RouterPass,
    count_loads,
    find_routers,
    join_experts,
    record_routers,
    replay_experts,
    weigh_sequences,
)
from temper_engine_api.determinism import use_deterministic_algorithms
from temper_engine_api.engine import BaseEngine, ObjectT
from temper_engine_api.errors import ConfigError
from temper_engine_api.hooks import DEFAULT_OUTPUT
from temper_engine_api.metrics import Metric, compute_load_metrics
from temper_engine_api.objective import (
    ROUTED_EXPERTS,
    HeadOutput,
    HeadOutputs,
    MicroBatchLoss,
    check_routed_experts,
)
from temper_engine_api.specs import EngineConfig, OptimizerSpec
from temper_engine_api.topology import Topology
from temper_engine_api.vision_language import list_encoder_modules
from temper_engine_api.weights import (
    NamedWeight,
    TrainingState,
    WeightEntry,
    check_saved_entries,
    check_weight_entries,
)

STATE_FILE, ADAPTER_FOLDER = "oracle.pt", "adapter"


class OracleEngine(BaseEngine):
    """The reference engine: each method in the simplest form that is correct."""

    config: OracleConfig
    config_class: ClassVar[type[EngineConfig]] = OracleConfig
    capabilities: ClassVar[frozenset[Capability]] = frozenset(
        {
            Capability.LANGUAGE_MODEL,
            Capability.VALUE_MODEL,
            Capability.REWARD_MODEL,
            Capability.LOGPROB_AT,
            Capability.ADAPTER,
            Capability.ADAPTER_ON_EXPERTS,
            Capability.PORTABLE_STATE,
            Capability.ROUTING_REPLAY,
        }
    )

    def _build(self) -> Topology:
        self.model = load_model(self.config)
        # Before an adapter is attached: the rules of some families look weights up by their name,
        # which PEFT changes.
        self._weight_layout = FileLayout(
            self.model, dict(self.model.named_parameters()) | self.buffers()
        )
        self.adapter = (
            OracleAdapter(self.model, self.config.lora) if self.config.lora.is_enabled else None
        )
        self.first_moments = {name: torch.zeros_like(p) for name, p in self.parameters().items()}
        self.second_moments = {name: torch.zeros_like(p) for name, p in self.parameters().items()}
        self.update_counts = dict.fromkeys(self.parameters(), 0)
        self._router_metrics: dict[str, Metric] = {}
        return Topology()

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by Hugging Face name, or by PEFT name for an adapter.

        A tied head appears once, under the embedding's name.
        """
        if self.adapter is not None:
            return self.adapter.parameters()
        return {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }

    def buffers(self) -> dict[str, Tensor]:
        """Return the buffers that model files contain, by Hugging Face name."""
        saved = self.model.state_dict().keys()
        return {name: buffer for name, buffer in self.model.named_buffers() if name in saved}

    def _run_micro_batches(
        self,
        batch: PackedBatch,
        *,
        requested_outputs: frozenset[HeadOutput],
        micro_batch_loss: MicroBatchLoss | None,
        forward_only: bool,
        reduce_gradients: bool,
    ) -> list[HeadOutputs] | None:
        is_training = micro_batch_loss is not None and not forward_only
        results, loads = [], []
        returns_experts = HeadOutput.ROUTED_EXPERTS in requested_outputs
        # Without any output of its head, the model would not run.
        of_head = requested_outputs - {HeadOutput.ROUTED_EXPERTS} or {
            DEFAULT_OUTPUT[self.config.model.model_type]
        }
        self._router_metrics = {}
        with torch.set_grad_enabled(not forward_only), self._determinism():
            for micro in batch.iterate_micro_batches():
                with record_routers(self.model) as passes:
                    head_outputs = self._compute_outputs(
                        micro,
                        requested_outputs=frozenset(of_head),
                        only_trained=is_training,
                    )
                if returns_experts:
                    column = {HeadOutput.ROUTED_EXPERTS: join_experts(passes)}
                    head_outputs = HeadOutputs(columns={**head_outputs.columns, **column})
                if micro_batch_loss is not None:
                    loss = micro_batch_loss(head_outputs, micro)
                    if is_training:
                        # Gradients add up over micro-batches; each loss is divided by the
                        # mini-batch's denominators already.
                        (loss + self._compute_router_loss(passes, batch, micro)).backward()
                if is_training and passes:
                    loads.append(count_loads(passes, micro))
                results.append(head_outputs.detach())
        if loads:
            total = self._sum_over_data_parallel(torch.stack(loads).sum(0))
            self._router_metrics |= compute_load_metrics(total)
        return results

    def _check_routed_experts(self, batch: PackedBatch) -> None:
        routers = find_routers(self.model)
        num_experts = min((len(cast(Tensor, router.weight)) for router in routers), default=0)
        check_routed_experts(batch, num_layers=len(routers), num_experts=num_experts)

    def _compute_router_loss(
        self, passes: list[list[RouterPass]], batch: PackedBatch, micro: SequenceBatch
    ) -> Tensor:
        """Return the router losses of a micro-batch, and add them to the metrics."""
        total = torch.zeros(())
        weights = weigh_sequences(micro, num_trained=batch.denominators.tokens)
        for name, coefficient in (
            ("load_balancing_loss", self.config.router_aux_loss),
            ("z_loss", self.config.router_z_loss),
        ):
            if not coefficient:
                continue
            loss = torch.zeros(())
            for layer in passes:
                for weight, each in zip(weights, layer, strict=True):
                    loss = loss + weight * (each.balance if name.startswith("load") else each.z)
            metric = Metric(value=loss.detach() / len(passes), reduction="sum")
            key = f"router/{name}"
            known = self._router_metrics.get(key)
            self._router_metrics[key] = metric if known is None else known.merge(metric)
            total = total + coefficient * loss
        return total

    def _collect_metrics(self) -> Mapping[str, Metric]:
        return self._router_metrics

    def _compute_outputs(
        self, micro: SequenceBatch, *, requested_outputs: frozenset[HeadOutput], only_trained: bool
    ) -> HeadOutputs:
        """Run the model on one sequence at a time."""
        with self._autocast():
            parts = [
                self._compute_sequence(micro.select([b]), requested_outputs=requested_outputs)
                for b in range(micro.num_sequences)
            ]
        # In training, outputs at untrained positions are 0 by contract.
        return join_outputs(parts, mask=micro.loss_mask if only_trained else None)

    def _compute_sequence(
        self, sequence: SequenceBatch, *, requested_outputs: frozenset[HeadOutput]
    ) -> dict[HeadOutput, Tensor]:
        with replay_experts(self.model, sequence.columns.get(ROUTED_EXPERTS)):
            return compute_sequence_outputs(
                self.model, sequence, requested_outputs=requested_outputs
            )

    def _autocast(self) -> AbstractContextManager[object]:
        if self.config.precision.compute == "bf16":
            return torch.autocast("cpu", dtype=torch.bfloat16)
        return nullcontext()

    def _determinism(self) -> AbstractContextManager[None]:
        return use_deterministic_algorithms() if self.config.deterministic else nullcontext()

    def _reduce_pending_gradients(self) -> None:
        """Do nothing: with one process, local gradients are the global ones."""

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients accumulated so far; zeros for parameters without one."""
        return {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in self.parameters().items()
        }

    def _apply_gradients(self, *, lr: float) -> float:
        assert self.config.optimizer is not None
        # Zeros for parameters without a gradient, so that their moments and weights decay too.
        gradients = self.gradients()
        # Use float64, so that the expected norm adds no rounding error.
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
        if not math.isfinite(norm):
            return norm
        limit = self.config.optimizer.clip_grad_norm
        if limit is None and norm**2 > torch.finfo(torch.float32).max:
            # Second moments would be infinite, and stay so.
            return math.inf
        # The formula of torch.nn.utils.clip_grad_norm_.
        scale = 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))
        with torch.no_grad():
            for name, parameter in self.parameters().items():
                self._adamw(
                    name, parameter, gradients[name] * scale, lr=lr, spec=self.config.optimizer
                )
        return norm

    def _adamw(
        self,
        name: str,
        parameter: nn.Parameter,
        gradient: Tensor,
        *,
        lr: float,
        spec: OptimizerSpec,
    ) -> None:
        """Apply AdamW, algorithm 2 of Loshchilov & Hutter 2019, arXiv:1711.05101.

        Vectors are decayed only if the spec says so.
        """
        beta1, beta2 = spec.betas
        self.update_counts[name] += 1
        t = self.update_counts[name]
        m = beta1 * self.first_moments[name] + (1 - beta1) * gradient
        v = beta2 * self.second_moments[name] + (1 - beta2) * gradient.square()
        self.first_moments[name], self.second_moments[name] = m, v
        m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
        if parameter.ndim >= 2 or spec.decays_vectors:
            # Decoupled decay before the step, in the order of torch.optim.AdamW.
            parameter.mul_(1 - lr * spec.weight_decay)
        parameter.sub_(lr * m_hat / (v_hat.sqrt() + spec.eps))

    def _zero_gradients(self) -> None:
        for parameter in self.parameters().values():
            parameter.grad = None

    @contextmanager
    def _loaded(self, mode: Literal["train", "eval", "update"]) -> Iterator[None]:
        """Switch the module to the mode; nothing is loaded, as everything is in host memory."""
        was_training = self.model.training
        if mode != "update":
            self.model.train(mode == "train")
        try:
            yield
        finally:
            self.model.train(was_training)

    def _iterate_weights(self) -> Iterator[NamedWeight]:
        weights = (
            dict(self.model.named_parameters())
            if self.adapter is None
            else dict(self.adapter.iterate_merged())
        ) | self.buffers()
        for name, tensor in self._weight_layout.to_files(weights).items():
            yield NamedWeight(name=name, tensor=tensor)

    def _load_weights(self, stream: Iterable[NamedWeight]) -> None:
        targets = (
            dict(self.model.named_parameters())
            if self.adapter is None
            else self.adapter.base_parameters()
        ) | self.buffers()
        layout = self._weight_layout
        # Read and check all entries before the first write, so that a bad stream changes no weight.
        received = list(stream)
        check_weight_entries(
            [_entry(name, tensor) for name, tensor in layout.to_files(targets).items()],
            [_entry(name, tensor) for name, tensor in received],
        )
        with torch.no_grad():
            for name, tensor in layout.from_files(dict(received)).items():
                targets[name].copy_(tensor)

    def _disable_adapter(self) -> AbstractContextManager[None]:
        assert self.adapter is not None, "the base class checks this"
        return self.adapter.disabled()

    def _export_adapter(self) -> tuple[Mapping[str, object], Mapping[str, Tensor]]:
        assert self.adapter is not None, "the base class checks this"
        return self.adapter.export()

    def _load_adapter(self, config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
        assert self.adapter is not None, "the base class checks this"
        self.adapter.load(config, tensors)

    def _file_layout(self) -> FileLayout:
        """Return the layout of the trained parameters."""
        return FileLayout(self.model, self.parameters(), is_adapter=self.adapter is not None)

    def _iterate_state(self) -> Iterator[TrainingState]:
        layout = self._file_layout()
        masters, firsts, seconds = (
            layout.to_files(kind)
            for kind in (self.parameters(), self.first_moments, self.second_moments)
        )
        for name, owner in layout.list_owners().items():
            yield TrainingState(
                name=name,
                master=masters[name],
                first_moment=firsts[name],
                second_moment=seconds[name],
                update_count=self.update_counts[owner],
            )

    def _load_state(self, stream: Iterable[TrainingState]) -> None:
        layout, received = self._file_layout(), list(stream)
        check_weight_entries(
            [_entry(name, p) for name, p in layout.to_files(self.parameters()).items()],
            [_entry(state.name, state.master) for state in received],
        )
        masters = layout.from_files({state.name: state.master for state in received})
        with torch.no_grad():
            for name, parameter in self.parameters().items():
                parameter.copy_(masters[name])
        self.first_moments = layout.from_files(
            {state.name: state.first_moment for state in received}
        )
        self.second_moments = layout.from_files(
            {state.name: state.second_moment for state in received}
        )
        owners = layout.list_owners()
        self.update_counts = {owners[state.name]: state.update_count for state in received}

    def _write_state(self, directory: str) -> list[str]:
        state = {
            "masters": {name: p.detach() for name, p in self.parameters().items()},
            "buffers": self.buffers(),
            "first_moments": self.first_moments,
            "second_moments": self.second_moments,
            "update_counts": self.update_counts,
            "random": torch.get_rng_state(),
        }
        torch.save(state, Path(directory) / STATE_FILE)
        if self.adapter is None:
            return [STATE_FILE]
        save_adapter(*self.adapter.export(), folder=Path(directory) / ADAPTER_FOLDER)
        return [STATE_FILE, *(f"{ADAPTER_FOLDER}/{name}" for name in (CONFIG_FILE, WEIGHTS_FILE))]

    def _read_state(self, directory: str) -> None:
        # weights_only, because a checkpoint from elsewhere must not be able to run code.
        state = torch.load(Path(directory) / STATE_FILE, weights_only=True)
        self._check_saved({**state["masters"], **state["buffers"]}, directory=directory)
        with torch.no_grad():
            for name, parameter in self.parameters().items():
                parameter.copy_(state["masters"][name])
            for name, buffer in self.buffers().items():
                buffer.copy_(state["buffers"][name])
        self.first_moments, self.second_moments = state["first_moments"], state["second_moments"]
        self.update_counts = state["update_counts"]
        torch.set_rng_state(state["random"])

    def _check_saved(self, tensors: Mapping[str, Tensor], *, directory: str) -> None:
        """Reject another model's checkpoint before anything changes."""
        expected: dict[str, Tensor] = {**self.parameters(), **self.buffers()}
        check_saved_entries(
            [_entry(name, tensor) for name, tensor in expected.items()],
            [_entry(name, tensor) for name, tensor in tensors.items()],
            directory=directory,
        )

    def _sum_over_data_parallel(self, value: Tensor) -> Tensor:
        return value

    def _gather_objects(self, item: ObjectT) -> list[ObjectT]:
        return [item]

    def to(
        self, device: Literal["cpu", "device"], *, model: bool = True, optimizer: bool = True
    ) -> None:
        """Check the arguments only: the oracle always computes on the CPU."""
        self._check_can_move(device)

    def close(self) -> None:
        """Drop the model and the optimizer state; does nothing if that was done before."""
        if hasattr(self, "model"):
            del self.model
        self.first_moments, self.second_moments, self.update_counts = {}, {}, {}


def load_model(config: EngineConfig) -> PreTrainedModel:
    """Load the transformers model in float32 with eager attention and the head for its type.

    Raises:
        ConfigError: `trust_remote_code` is True.
    """
    spec = config.model
    if spec.trust_remote_code:
        raise ConfigError(
            "model.trust_remote_code is True, but the oracle does not run third-party code: "
            "set it to False."
        )
    head: Mapping[str, int] = {} if spec.model_type == "language_model" else {"num_labels": 1}
    # Weights that the files lack, such as a new value head, are drawn from this seed.
    torch.manual_seed(spec.seed)
    if spec.path is not None:
        hf_config = AutoConfig.from_pretrained(spec.path, local_files_only=True)
        model: PreTrainedModel = get_auto_class(hf_config, spec.model_type).from_pretrained(
            spec.path,
            dtype=torch.float32,
            # Eager attention is plain matmuls and a softmax; the choice of a fused kernel depends
            # on the machine.
            attn_implementation="eager",
            # A path that does not exist must fail and not be looked up on the Hub.
            local_files_only=True,
            **head,
        )
    else:
        settings = spec.to_config_fields()
        hf_config = AutoConfig.for_model(settings.pop("model_type"), **settings, **head)
        model = get_auto_class(hf_config, spec.model_type).from_config(
            hf_config, dtype=torch.float32, attn_implementation="eager"
        )
    for name in list_encoder_modules(model, model_type=hf_config.model_type):
        model.get_submodule(name).requires_grad_(False)
    # from_pretrained leaves the model in eval mode, from_config in training mode.
    model.eval()
    return model


def _entry(name: str, tensor: Tensor) -> WeightEntry:
    return WeightEntry(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype)
