"""Checkpoints with one directory layout for all engines.

A step is written to a temporary directory, listed with checksums in a manifest, and committed by
renaming the directory.
"""

from temper_engine_api.checkpoint.damaged_steps import (
    delete_old_damaged_steps,
    describe_damaged_steps,
)
from temper_engine_api.checkpoint.engine_checkpoint import (
    ENGINE_PART,
    PROGRESS_FILE,
    BackgroundSave,
    StagedEngine,
    load_engine_checkpoint,
    run_on_every_rank,
    save_engine_checkpoint,
)
from temper_engine_api.checkpoint.manifest import (
    Manifest,
    ManifestInfo,
    hash_config,
    list_package_versions,
    verify,
)
from temper_engine_api.checkpoint.part_files import (
    FileRecord,
    PartReport,
    read_json,
    report_part,
    write_json,
)
from temper_engine_api.checkpoint.remote_copy import download, upload
from temper_engine_api.checkpoint.step_directories import (
    delete_killed_saves,
    find_latest_step,
    find_step,
    list_complete_steps,
    list_partial_saves,
    list_step_entries,
    lock_for_reading,
    prune,
    set_aside,
    step_directory,
)
from temper_engine_api.checkpoint.transaction import CheckpointTransaction, begin_checkpoint

__all__ = [
    "ENGINE_PART",
    "PROGRESS_FILE",
    "BackgroundSave",
    "CheckpointTransaction",
    "FileRecord",
    "Manifest",
    "ManifestInfo",
    "PartReport",
    "StagedEngine",
    "begin_checkpoint",
    "delete_killed_saves",
    "delete_old_damaged_steps",
    "describe_damaged_steps",
    "download",
    "find_latest_step",
    "find_step",
    "hash_config",
    "list_complete_steps",
    "list_package_versions",
    "list_partial_saves",
    "list_step_entries",
    "load_engine_checkpoint",
    "lock_for_reading",
    "prune",
    "read_json",
    "report_part",
    "run_on_every_rank",
    "save_engine_checkpoint",
    "set_aside",
    "step_directory",
    "upload",
    "verify",
    "write_json",
]
