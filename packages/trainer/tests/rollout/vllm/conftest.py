"""A vLLM server of this machine, where there is an interpreter that has vLLM."""

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch

from packages.trainer.tests.rollout.models_for_tests import END, VOCAB_SIZE, Pair, make_tokenizer
from temper_engine_api.weights import NamedWeight
from temper_trainer.rollout.packed_bucket import PackedBucket, split_into_buckets, write_weight_file
from temper_trainer.rollout.vllm.messages import Argument, ServerSpec
from temper_trainer.rollout.vllm.server_process import ServerProcess
from temper_trainer.rollout.vllm.vllm_sampler import VllmSampler

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
}


@pytest.fixture(scope="session")
def rollout_python() -> str:
    """An interpreter with vLLM in it."""
    named = os.environ.get("TEMPER_ROLLOUT_PYTHON")
    if named is None and importlib.util.find_spec("vllm") is None:
        pytest.skip(
            "vLLM is neither installed here nor named by TEMPER_ROLLOUT_PYTHON: nox -s vllm makes "
            "an environment and runs this"
        )
    return named or sys.executable


class Served:
    """A reference model, and servers that get its weights."""

    def __init__(self, pair: Pair, sampler: VllmSampler, folder: Path) -> None:
        self.pair = pair
        self.sampler = sampler
        self._folder = folder

    def write_buckets(self, version: int, *, bucket_bytes: int = 1 << 20) -> list[PackedBucket]:
        """Write the model's weights as an engine exports them: tied weights once."""
        folder = self._folder / f"version-{version}-{bucket_bytes}"
        folder.mkdir()
        weights = [
            NamedWeight(name, value.detach()) for name, value in self.pair.model.named_parameters()
        ]
        parts = split_into_buckets(weights, bucket_bytes=bucket_bytes)
        return [
            write_weight_file(part, folder / str(i), with_digest=True)
            for i, part in enumerate(parts)
        ]

    def publish(self, version: int, *, bucket_bytes: int = 1 << 20) -> None:
        """Load the model's current weights into the servers under a version."""
        buckets = self.write_buckets(version, bucket_bytes=bucket_bytes)
        self.sampler.load(
            lambda replica: replica.call("load_files", buckets, version), version=version
        )

    def publish_next(self, *, bucket_bytes: int = 1 << 20) -> int:
        """Publish the next version and return its number."""
        version = self.sampler.weight_version + 1
        self.publish(version, bucket_bytes=bucket_bytes)
        return version

    @torch.no_grad()
    def perturb(self, seed: int) -> None:
        """Change the weights, also for transformers samplers that are built later."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.pair.model.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) * 0.1
        self.pair.model.save_pretrained(self.pair.directory)


Serve = Callable[..., Served]


@pytest.fixture(scope="session")
def serve(rollout_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Start servers for a model; ended with the session."""
    started: list[VllmSampler] = []

    def start(
        pair: Pair,
        *,
        num_replicas: int = 1,
        more: Mapping[str, Argument] | None = None,
        has_expert_choices: bool = False,
    ) -> Served:
        folder = tmp_path_factory.mktemp("served")
        make_tokenizer().save_pretrained(pair.directory)
        spec = server_spec_for_tests(pair, more=more, has_expert_choices=has_expert_choices)
        replicas = [
            server_for_tests(spec, number=i, python=rollout_python, folder=folder)
            for i in range(num_replicas)
        ]
        started.append(VllmSampler(replicas, spec=spec, max_restarts=4))
        return Served(pair, started[-1], folder)

    yield start
    for sampler in started:
        sampler.close()


def server_spec_for_tests(
    pair: Pair,
    *,
    more: Mapping[str, Argument] | None = None,
    has_expert_choices: bool = False,
) -> ServerSpec:
    arguments: dict[str, Argument] = {
        "model": str(pair.directory),
        "dtype": "float32",
        "max_num_seqs": 16,
        "max_model_len": 256,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 64 << 20,
        "load_format": "dummy",
        "disable_log_stats": True,
        "generation_config": "vllm",
    }
    return ServerSpec(
        arguments=arguments | dict(more or {}),
        end_token_ids=(END,),
        max_length=256,
        vocab_size=VOCAB_SIZE,
        has_expert_choices=has_expert_choices,
        environment=ENVIRONMENT,
    )


def server_for_tests(spec: ServerSpec, *, number: int, python: str, folder: Path) -> ServerProcess:
    return ServerProcess(
        spec,
        name=f"rollout replica {number}",
        python=python,
        log_file=folder / f"replica-{number}.log",
        start_timeout_s=600,
        stall_timeout_s=300,
    )
