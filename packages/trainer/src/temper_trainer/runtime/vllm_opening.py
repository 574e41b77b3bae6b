"""The vLLM servers of a run: processes of the driver, or one Ray actor each that holds its process."""

import sys
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from temper_trainer.config.run import TrainerConfig
from temper_trainer.rollout.replica import Replica
from temper_trainer.rollout.vllm.client import ServerProcess
from temper_trainer.rollout.vllm.messages import ServerSpec
from temper_trainer.rollout.vllm.sampler import VllmSampler
from temper_trainer.rollout.vllm.spec import server_spec


def open_local_servers(config: TrainerConfig, *, tokenizer: PreTrainedTokenizerBase) -> VllmSampler:
    """Servers beside the driver."""
    spec = server_spec(config, tokenizer=tokenizer)
    specs = [spec] * config.rollout.num_replicas
    if config.runtime.rollout_devices:
        devices = config.runtime.rollout_devices
        specs = [replace(spec, environment={**spec.environment, "CUDA_VISIBLE_DEVICES": names}) for names in devices]
    replicas: list[Replica] = [make_server(config, spec=own, number=number) for number, own in enumerate(specs)]
    return VllmSampler(replicas, spec=spec, max_restarts=config.rollout.vllm.max_restarts)


def make_server(config: TrainerConfig, *, spec: ServerSpec, number: int) -> ServerProcess:
    """One server on this machine, not started yet; its log lies in the run folder."""
    vllm = config.rollout.vllm
    return ServerProcess(
        spec,
        name=f"rollout replica {number}",
        python=config.runtime.rollout_python or sys.executable,
        log_file=Path(config.run.dir).resolve() / "rollout" / f"replica-{number}.log",
        start_timeout_s=vllm.start_timeout_s,
        stall_timeout_s=vllm.stall_timeout_s,
    )
