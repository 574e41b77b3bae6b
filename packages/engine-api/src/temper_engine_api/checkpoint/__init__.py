"""Checkpoints as transactions: one layout for all engines, committed by a rename, checked by a manifest."""

from temper_engine_api.checkpoint.alone import ENGINE_PART, load_alone, save_alone
from temper_engine_api.checkpoint.background import PROGRESS_FILE, BackgroundSave, StagedEngine
from temper_engine_api.checkpoint.layout import (
    complete_steps,
    find_step,
    last_complete_step,
    leftovers,
    prune,
    reading,
    set_aside,
    step_directory,
    step_entries,
)
from temper_engine_api.checkpoint.manifest import (
    Manifest,
    ManifestInfo,
    config_hash,
    package_versions,
    verify,
)
from temper_engine_api.checkpoint.parts import (
    FileRecord,
    PartReport,
    read_json,
    report_part,
    write_json,
)
from temper_engine_api.checkpoint.remote import download, upload
from temper_engine_api.checkpoint.transaction import Transaction, begin

__all__ = [
    "ENGINE_PART",
    "PROGRESS_FILE",
    "BackgroundSave",
    "FileRecord",
    "Manifest",
    "ManifestInfo",
    "PartReport",
    "StagedEngine",
    "Transaction",
    "begin",
    "complete_steps",
    "config_hash",
    "download",
    "find_step",
    "last_complete_step",
    "leftovers",
    "load_alone",
    "package_versions",
    "prune",
    "read_json",
    "reading",
    "report_part",
    "save_alone",
    "set_aside",
    "step_directory",
    "step_entries",
    "upload",
    "verify",
    "write_json",
]
