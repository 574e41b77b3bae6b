"""Test finding cores near a device in a copy of Linux's sysfs."""

import logging
import os
from pathlib import Path

import pytest
import torch

from temper_engine_fsdp.runtime.numa_affinity import (
    bind_to_near_cores,
    find_near_cores,
    parse_core_list,
)

ADDRESS = "0000:1b:00.0"


def tree(root: Path, *, node: int, cores: str) -> Path:
    device, memory = (
        root / "bus/pci/devices" / ADDRESS,
        root / f"devices/system/node/node{max(node, 0)}",
    )
    device.mkdir(parents=True)
    memory.mkdir(parents=True)
    (device / "numa_node").write_text(f"{node}\n")
    (memory / "cpulist").write_text(f"{cores}\n")
    return root


def test_a_list_of_cores_holds_ranges_and_single_ones() -> None:
    assert parse_core_list("0-2,8,10-11\n") == {0, 1, 2, 8, 10, 11}
    assert parse_core_list("\n") == set()


def test_only_allowed_cores_of_the_node_are_taken(tmp_path: Path) -> None:
    root = tree(tmp_path, node=1, cores="4-7,12")
    assert find_near_cores(ADDRESS, allowed=range(6), root=root) == {4, 5}


def test_machine_without_node_information_gives_no_cores(tmp_path: Path) -> None:
    assert find_near_cores(ADDRESS, allowed=range(6), root=tmp_path) == set()
    assert (
        find_near_cores(ADDRESS, allowed=range(6), root=tree(tmp_path, node=-1, cores="0-5"))
        == set()
    )


def test_numa_affinity_on_a_cpu_logs_that_it_has_no_effect(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = os.sched_getaffinity(0)
    with caplog.at_level(logging.INFO):
        bind_to_near_cores(torch.device("cpu"))
    assert "numa_affinity has no effect for cpu" in caplog.text
    assert os.sched_getaffinity(0) == before
