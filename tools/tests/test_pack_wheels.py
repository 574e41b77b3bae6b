"""Wheels are unpacked as pip would do it."""

import os
import zipfile
from pathlib import Path

from tools.gpu.pack_wheels import unpack


def test_programs_stay_executable_and_pruned_files_are_left_out(tmp_path: Path) -> None:
    wheel = tmp_path / "ray-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, mode in (("ray/raylet", 0o755), ("ray/api.py", 0o644), ("ray/jars/x.jar", 0o644)):
            entry = zipfile.ZipInfo(name)
            entry.external_attr = mode << 16
            archive.writestr(entry, "text")
    unpack([wheel], tmp_path / "site")
    files = {path.name: path for path in (tmp_path / "site").rglob("*") if path.is_file()}
    assert set(files) == {"raylet", "api.py"}
    assert os.access(files["raylet"], os.X_OK)
    assert files["api.py"].stat().st_mode & 0o777 == 0o644
