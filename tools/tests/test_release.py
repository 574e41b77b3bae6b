"""Fragments become an entry, and nothing is passed over in silence."""

import re
import shutil
from pathlib import Path

import pytest

from tools.release import ReleaseTrouble, release

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """engine-api's own release settings, with two fragments, outside the repository."""
    folder = tmp_path / "packages" / "engine-api"
    (folder / "changes").mkdir(parents=True)
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "changelog.md.jinja", tmp_path / "tools")
    declared = (ROOT / "packages" / "engine-api" / "pyproject.toml").read_text()
    (folder / "pyproject.toml").write_text(re.sub(r'(?m)^version = ".*"$', 'version = "0.3.0"', declared))
    (folder / "CHANGELOG.md").write_text("# Changes\n\n<!-- releases below -->\n\n## 0.2.0 (2020-01-01)\n\nOld.\n")
    (folder / "changes" / "plan.added.md").write_text("The plan.\n")
    (folder / "changes" / "seed.fixed.md").write_text("The seed.\n")
    return folder


def test_a_release_binds_the_fragments_above_the_older_entry(package: Path) -> None:
    assert release(package, is_draft=False) == "engine-api/v0.3.0"
    text = (package / "CHANGELOG.md").read_text()
    order = [
        "<!-- releases below -->",
        "## 0.3.0 (",
        "### Added",
        "* The plan.",
        "### Fixed",
        "* The seed.",
        "## 0.2.0",
    ]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert list((package / "changes").iterdir()) == []


def test_a_draft_changes_nothing(package: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = (package / "CHANGELOG.md").read_text()
    assert release(package, is_draft=True) == "engine-api/v0.3.0"
    assert "* The plan." in capfd.readouterr().out
    assert (package / "CHANGELOG.md").read_text() == before
    assert len(list((package / "changes").iterdir())) == 2


def test_a_misnamed_fragment_stops_the_release(package: Path) -> None:
    (package / "changes" / "speed.faster.md").touch()
    with pytest.raises(ReleaseTrouble, match=r"speed\.faster\.md"):
        release(package, is_draft=False)


def test_a_version_is_released_once(package: Path) -> None:
    release(package, is_draft=False)
    (package / "changes" / "late.fixed.md").write_text("Late.\n")
    with pytest.raises(ReleaseTrouble, match=r"has an entry for 0\.3\.0 already"):
        release(package, is_draft=False)


def test_nothing_to_say_is_nothing_to_release(package: Path) -> None:
    for path in (package / "changes").iterdir():
        path.unlink()
    with pytest.raises(ReleaseTrouble, match="nothing to release"):
        release(package, is_draft=True)
