"""Test which commit the report names for each way of installing."""

import shutil
import subprocess
from pathlib import Path

import pytest

from temper_trainer.versions import read_commit


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a clone with one package of two files, the folder of which is `packages/trainer`."""
    package = tmp_path / "clone" / "packages" / "trainer" / "src" / "acme"
    (package / "parts").mkdir(parents=True)
    (package / "__init__.py").write_text('"""Do it."""\n')
    (package / "parts" / "loop.py").write_text("steps = 3\n")
    git(tmp_path / "clone", "init", "--quiet")
    git(tmp_path / "clone", "add", ".")
    git(tmp_path / "clone", "commit", "--quiet", "-m", "first")
    return tmp_path / "clone"


def origin_of(clone: Path, **info: bool) -> dict[str, object]:
    return {"url": (clone / "packages" / "trainer").as_uri(), "dir_info": info}


@pytest.mark.parametrize("is_editable", [True, False])
def test_package_from_a_folder_of_a_clone_has_its_commit(clone: Path, is_editable: bool) -> None:
    source = clone / "packages" / "trainer" / "src" / "acme"
    installed = source
    if not is_editable:
        installed = Path(shutil.copytree(source, clone.parent / "site-packages" / "acme"))
    origin = origin_of(clone, editable=is_editable)
    commit = git(clone, "rev-parse", "HEAD")
    assert read_commit(origin, package=installed) == commit
    (installed / "parts" / "loop.py").write_text("steps = 4\n")
    assert read_commit(origin, package=installed) == f"{commit}-changed"
    (installed / "parts" / "loop.py").unlink()
    assert read_commit(origin, package=installed) == f"{commit}-changed"


def test_clone_that_moved_on_does_not_lend_its_new_commit(clone: Path) -> None:
    source = clone / "packages" / "trainer" / "src" / "acme"
    installed = Path(shutil.copytree(source, clone.parent / "site-packages" / "acme"))
    (source / "parts" / "loop.py").write_text("steps = 4\n")
    git(clone, "commit", "--quiet", "-am", "second")
    second = git(clone, "rev-parse", "HEAD")
    assert read_commit(origin_of(clone), package=installed) == f"{second}-changed"


def test_commit_of_a_repository_is_the_installed_one(tmp_path: Path) -> None:
    origin = {"url": "https://example.org/a.git", "vcs_info": {"vcs": "git", "commit_id": "12ab"}}
    assert read_commit(origin, package=tmp_path) == "12ab"


def test_wheel_and_deleted_clone_have_no_commit(clone: Path, tmp_path: Path) -> None:
    package = clone / "packages" / "trainer" / "src" / "acme"
    assert read_commit({}, package=package) is None
    wheel = {"url": "file:///tmp/a.whl", "archive_info": {}}
    assert read_commit(wheel, package=package) is None
    assert read_commit(origin_of(tmp_path / "deleted"), package=package) is None
