"""Verifying a checkpoint by processes of a Ray cluster."""

from pathlib import Path

import pytest

pytest.importorskip("ray", reason="needs the extra ray")

from temper_engine_api.checkpoint import ManifestInfo, begin_checkpoint, report_part
from temper_engine_api.errors import DamagedCheckpointError
from temper_trainer.config.run import RuntimeConfig
from temper_trainer.runtime.checkpoint_verification import verify_on_cluster


@pytest.mark.ray
def test_processes_verify_different_files_and_damage_is_named(tmp_path: Path) -> None:
    import ray

    names = [f"{i}.bin" for i in range(4)]
    with begin_checkpoint(tmp_path, 1) as transaction:
        part = transaction.open_part("actor")
        for i, name in enumerate(names):
            (part / name).write_bytes(bytes([i]) * (1000 + i))
        step = transaction.commit(
            {"actor": [report_part(part, names)]}, info=ManifestInfo(topology={}, config_hash="")
        )
    try:
        verify_on_cluster(step, num_ranks=2, runtime=RuntimeConfig(kind="ray"))
        (step / "actor" / "0.bin").write_bytes(b"x" * 1000)
        with pytest.raises(DamagedCheckpointError, match=r"0\.bin has another checksum"):
            verify_on_cluster(step, num_ranks=2, runtime=RuntimeConfig(kind="ray"))
    finally:
        ray.shutdown()
