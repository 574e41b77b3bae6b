"""Test a release in a temporary repository: what it changes, what it keeps, what it refuses."""

import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tools.api import find_broken_promises
from tools.compat import list_trials, record_passed
from tools.release import main, verify_release
from tools.release_checks import (
    check_release,
    check_trials,
    find_reused_versions,
    list_fragments,
    next_version,
    read_declared_version,
)
from tools.release_records import (
    RECORDS,
    ReleaseError,
    ReleaseRecord,
    git,
    last_release,
    list_published,
    read_records,
    record_commits,
    unpack_tree,
    write_records,
)

ROOT = Path(__file__).resolve().parents[2]
REASONS = (("0.1.0", ""), ("0.1.1", 'only "words" changed: \\ and ü'))
IDENTITY = (
    "-c",
    "user.name=Tester",
    "-c",
    "user.email=tester@example.org",
    "-c",
    "commit.gpgsign=false",
    "-c",
    "tag.gpgsign=false",
)


def _repository(root: Path) -> Path:
    """Commit two small packages with our release settings; engine-api has two fragments."""
    (root / "tools").mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "changelog.md.jinja", root / "tools")
    (root / ".gitignore").write_text("/dist/\n/.temper/\n")
    for name in ("engine-api", "engine-fsdp"):
        folder = root / "packages" / name
        sources = folder / "src" / ("temper_" + name.replace("-", "_"))
        sources.mkdir(parents=True)
        declared = (ROOT / "packages" / name / "pyproject.toml").read_text()
        declared = re.sub(r'(?m)^version = ".*"$', 'version = "0.3.0"', declared)
        declared = re.sub(
            r"temper-engine-api>=[\w.]+,<[\d.]+", "temper-engine-api>=0.3,<0.4", declared
        )
        (folder / "pyproject.toml").write_text(declared)
        (folder / "CHANGELOG.md").write_text(
            "# Changes\n\n<!-- releases below -->\n\n## 0.2.0 (2020-01-01)\n\nOld.\n"
        )
        (folder / "README.md").write_text(f"# temper-{name}\n")
        shutil.copy(ROOT / "LICENSE", folder / "LICENSE")
        (sources / "__init__.py").write_text(
            "def plan(lengths: list[int]) -> int:\n    return len(lengths)\n"
        )
        (sources / "py.typed").touch()
        (folder / "changes").mkdir()
    (root / "packages/engine-api/changes/plan.added.md").write_text("The plan.\n")
    (root / "packages/engine-api/changes/seed.fixed.md").write_text("The seed.\n")
    git(root, "init", "--quiet")
    _commit(root, "begin")
    return root


def _commit(root: Path, message: str) -> str:
    git(root, "add", "--all")
    git(root, *IDENTITY, "commit", "--quiet", "-m", message)
    return git(root, "rev-parse", "HEAD").strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return _repository(tmp_path / "repository")


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """A repository in which engine-api 0.3.0 was drafted, released and committed."""

    root: Path
    after_draft: str
    """Output of `git status` after the draft."""
    staged: str
    """Output of `git status` after the release."""
    commit: str


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Released:
    root = _repository(tmp_path_factory.mktemp("released") / "repository")
    assert main(["engine-api", "0.3.0", "--draft"], root=root) == 0
    after_draft = git(root, "status", "--porcelain", "--ignored")
    assert main(["engine-api", "0.3.0"], root=root) == 0
    staged = git(root, "status", "--porcelain")
    return Released(
        root=root,
        after_draft=after_draft,
        staged=staged,
        commit=_commit(root, "engine-api: release 0.3.0"),
    )


def test_a_draft_changes_nothing(released: Released) -> None:
    assert released.after_draft == ""


def test_a_release_is_staged_and_not_committed(released: Released) -> None:
    assert released.staged.splitlines() == [
        "M  packages/engine-api/CHANGELOG.md",
        "A  packages/engine-api/api.txt",
        "D  packages/engine-api/changes/plan.added.md",
        "D  packages/engine-api/changes/seed.fixed.md",
        "A  tools/releases.toml",
    ]


def test_release_adds_the_fragments_above_older_entries(released: Released) -> None:
    text = (released.root / "packages/engine-api/CHANGELOG.md").read_text()
    order = [
        "<!-- releases below -->",
        "## 0.3.0 (",
        "### Added",
        "* The plan.",
        "### Fixed",
        "* The seed.",
        "## 0.2.0",
    ]
    positions = [text.index(part) for part in order]
    assert positions == sorted(positions)


def test_release_stores_its_files_and_their_hashes(released: Released) -> None:
    (record,) = read_records(released.root)
    assert sorted(record.sha256) == sorted(path.name for path in (released.root / "dist").iterdir())
    assert sorted(record.sha256) == [
        "temper_engine_api-0.3.0-py3-none-any.whl",
        "temper_engine_api-0.3.0.tar.gz",
    ]


def test_a_release_is_found_without_a_tag_and_with_one(released: Released, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    git(released.root, "clone", "--quiet", "--no-tags", str(released.root), str(clone))
    by_record = last_release(clone, "engine-api")
    assert by_record is not None
    git(
        clone,
        *IDENTITY,
        "tag",
        "-a",
        "engine-api/v0.3.0",
        "-m",
        "temper-engine-api 0.3.0",
        released.commit,
    )
    by_tag = last_release(clone, "engine-api")
    assert by_tag is not None
    assert (by_record.version, by_tag.version, by_tag.treeish) == (
        "0.3.0",
        "0.3.0",
        "engine-api/v0.3.0:packages/engine-api",
    )
    assert git(clone, "rev-parse", by_tag.treeish).strip() == by_record.treeish
    assert (
        read_declared_version(unpack_tree(clone, by_record.treeish, tmp_path / "unpacked"))
        == "0.3.0"
    )


def test_the_commit_is_recorded_once_it_is_made(released: Released, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    git(released.root, "clone", "--quiet", str(released.root), str(clone))
    (clone / "later.txt").touch()
    _commit(clone, "something else")
    assert [record.commit for record in record_commits(clone)] == [released.commit]
    assert [record.commit for record in read_records(clone)] == [released.commit]
    assert record_commits(clone) == []


def test_recording_a_release_starts_the_next_version(released: Released, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    git(released.root, "clone", "--quiet", str(released.root), str(clone))
    assert main(["--record"], root=clone) == 0
    assert read_declared_version(clone / "packages/engine-api") == "0.3.1.dev0"
    assert read_declared_version(clone / "packages/engine-fsdp") == "0.3.0"  # was not released
    assert main(["--record"], root=clone) == 0
    assert read_declared_version(clone / "packages/engine-api") == "0.3.1.dev0"


@pytest.mark.parametrize(
    ("released_version", "next_one"), [("0.2.0", "0.2.1.dev0"), ("1.0.9", "1.0.10.dev0")]
)
def test_next_version_raises_the_patch_number(released_version: str, next_one: str) -> None:
    assert next_version(released_version) == next_one


def test_changed_code_may_not_carry_the_version_of_a_release(
    released: Released, tmp_path: Path
) -> None:
    clone = tmp_path / "clone"
    git(released.root, "clone", "--quiet", str(released.root), str(clone))
    assert find_reused_versions(clone) == []
    (clone / "packages/engine-api/src/temper_engine_api/more.py").touch()
    assert find_reused_versions(clone) == [
        (
            "engine-api/pyproject.toml declares 0.3.0, but the package differs from release 0.3.0: "
            "set the version to 0.3.1.dev0 (tools/release.py --record does)."
        )
    ]
    assert git(clone, "diff", "--cached", "--name-only") == ""
    main(["--record"], root=clone)
    assert find_reused_versions(clone) == []


def test_no_package_carries_the_version_of_a_release_it_differs_from() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("a git clone runs this")
    assert find_reused_versions(ROOT) == []


@pytest.fixture
def withdrawn(released: Released, tmp_path: Path) -> Path:
    """A clone in which release 0.3.0 of engine-api was withdrawn and tagged, without a lock."""
    clone = tmp_path / "clone"
    git(released.root, "clone", "--quiet", str(released.root), str(clone))
    git(clone, *IDENTITY, "tag", "-a", "engine-api/v0.3.0", "-m", "0.3.0", released.commit)
    write_records(clone, [replace(read_records(clone)[0], withdrawn="never published")])
    (clone / "packages/engine-api/api.txt").unlink()
    (clone / "packages/engine-api/changes").mkdir()
    (clone / "packages/engine-api/changes/late.fixed.md").write_text("Late.\n")
    return clone


def test_a_withdrawn_release_is_not_the_last_release(withdrawn: Path) -> None:
    assert [record.withdrawn for record in read_records(withdrawn)] == ["never published"]
    assert list_published(withdrawn, "engine-api") == []
    assert last_release(withdrawn, "engine-api") is None
    assert list_trials(withdrawn, "engine-api:engine-fsdp") == []


def test_a_withdrawn_release_promises_no_names(withdrawn: Path) -> None:
    init = withdrawn / "packages/engine-api/src/temper_engine_api/__init__.py"
    init.write_text("def renamed_plan() -> None: ...\n")
    (withdrawn / "packages/engine-api/changes/plan.removed.md").write_text("`plan` is gone.\n")
    assert find_broken_promises(withdrawn / "packages/engine-api") == []
    check_release(withdrawn, "engine-api", "0.3.1")


def test_the_version_of_a_withdrawn_release_is_not_used_again(withdrawn: Path) -> None:
    with pytest.raises(ReleaseError, match=r"0\.3\.0 is already released"):
        check_release(withdrawn, "engine-api", "0.3.0")
    assert "set the version to 0.3.1.dev0" in find_reused_versions(withdrawn)[0]


def test_commit_with_other_contents_than_were_built_is_refused(
    released: Released, tmp_path: Path
) -> None:
    clone = tmp_path / "clone"
    git(released.root, "clone", "--quiet", str(released.root), str(clone))
    (clone / "packages/engine-api/README.md").write_text("changed after the build\n")
    git(clone, "add", "--all")
    git(clone, *IDENTITY, "commit", "--quiet", "--amend", "-m", "engine-api: release 0.3.0")
    with pytest.raises(ReleaseError, match="files were changed after"):
        record_commits(clone)


def test_a_release_is_built_again_from_its_record(released: Released, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    git(released.root, "clone", "--quiet", str(released.root), str(clone))
    verify_release(clone, "engine-api", "0.3.0", out=tmp_path / "dist")
    assert sorted(path.suffix for path in (tmp_path / "dist").iterdir()) == [".gz", ".whl"]
    # The message names only the wheel, because the sdist has the recorded hash.
    text = (clone / RECORDS).read_text()
    (clone / RECORDS).write_text(re.sub(r'(\.whl" = )"\w{8}', r'\1"00000000', text))
    with pytest.raises(
        ReleaseError,
        match=r"^temper_engine_api-0\.3\.0-py3-none-any\.whl has another hash",
    ):
        verify_release(clone, "engine-api", "0.3.0")


def test_a_version_is_released_once_and_the_next_one_is_higher(
    released: Released, tmp_path: Path
) -> None:
    clone = tmp_path / "clone"
    git(released.root, "clone", "--quiet", str(released.root), str(clone))
    (clone / "packages/engine-api/changes").mkdir()
    (clone / "packages/engine-api/changes/late.fixed.md").write_text("Late.\n")
    for version in ("0.3.0", "0.2.9"):
        with pytest.raises(ReleaseError, match=r"0\.3\.0 is already released"):
            check_release(clone, "engine-api", version)
    check_release(clone, "engine-api", "0.3.1")
    (clone / "packages/engine-api/changes/plan.removed.md").write_text("The plan is gone.\n")
    with pytest.raises(ReleaseError, match="raise the minor version"):
        check_release(clone, "engine-api", "0.3.1")


def test_unannounced_break_stops_the_next_release(released: Released, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    git(released.root, "clone", "--quiet", str(released.root), str(clone))
    folder = clone / "packages/engine-api"
    (folder / "changes").mkdir()
    (folder / "changes/late.fixed.md").write_text("Late.\n")
    (folder / "src/temper_engine_api/__init__.py").write_text(
        "def plan(lengths: list[int]) -> float:\n    return 0.0\n"
    )
    with pytest.raises(
        ReleaseError,
        match=r"temper_engine_api\.plan was 'function -> int' and is 'function -> float'",
    ):
        check_release(clone, "engine-api", "0.3.1")


@pytest.fixture
def sibling(released: Released, tmp_path: Path) -> Path:
    """A clone in which engine-fsdp has changes to release, too."""
    clone = tmp_path / "clone"
    git(released.root, "clone", "--quiet", str(released.root), str(clone))
    (clone / "packages/engine-fsdp/changes").mkdir()
    (clone / "packages/engine-fsdp/changes/first.added.md").write_text("All of it.\n")
    _commit(clone, "say so")
    return clone


def test_a_package_that_was_not_tried_with_its_siblings_is_not_released(
    sibling: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["engine-fsdp", "0.3.0"], root=sibling) == 1
    error = capsys.readouterr().err
    assert "engine-fsdp with engine-api 0.3.0 (" in error
    assert "Run nox -s \"compat(pair='engine-api:engine-fsdp')\"\nOr give --untried REASON" in error
    assert git(sibling, "status", "--porcelain") == ""


@pytest.mark.parametrize(
    ("version", "expected"), [("0.2.7", "0.2.7 is below it"), ("v0.3.0", "write three numbers")]
)
def test_invalid_version_is_reported_before_missing_trials(
    sibling: Path, capsys: pytest.CaptureFixture[str], version: str, expected: str
) -> None:
    assert main(["engine-fsdp", version], root=sibling) == 1
    error = capsys.readouterr().err
    assert expected in error
    assert "nox -s" not in error


def test_package_together_with_record_is_refused(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["engine-api", "--record"], root=repository)
    assert "give PACKAGE and VERSION, or only --record" in capsys.readouterr().err


def test_passed_trials_permit_the_release(sibling: Path) -> None:
    record_passed(sibling, "engine-api:engine-fsdp", list_trials(sibling, "engine-api:engine-fsdp"))
    check_trials(sibling, "engine-fsdp", "0.3.0", reason="")
    with pytest.raises(ReleaseError, match="remove --untried"):
        check_trials(sibling, "engine-fsdp", "0.3.0", reason="no time")


def test_a_reason_is_recorded_as_it_was_given(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    records = [
        ReleaseRecord(
            package="engine-api", version=version, date="2026-01-01", tree="", untried=reason
        )
        for version, reason in REASONS
    ]
    write_records(tmp_path, records)
    assert list(read_records(tmp_path)) == records
    assert (tmp_path / RECORDS).read_text().count("untried") == 1


def test_records_contain_the_tag_and_a_wrong_one_is_refused(
    released: Released, tmp_path: Path
) -> None:
    text = (released.root / RECORDS).read_text()
    assert text.count('tag = "engine-api/v0.3.0"\n') == 1
    (tmp_path / "tools").mkdir()
    (tmp_path / RECORDS).write_text(text.replace('"engine-api/v0.3.0"', '"engine-api/v0.4.0"'))
    with pytest.raises(
        ReleaseError,
        match=r"the tag 'engine-api/v0\.4\.0' for engine-api 0\.3\.0, "
        r"expected 'engine-api/v0\.3\.0'",
    ):
        read_records(tmp_path)


# Nightly: makes one more release. A test above reads recorded reasons back.
@pytest.mark.nightly
def test_a_reason_for_an_untried_release_is_kept(sibling: Path) -> None:
    assert main(["engine-fsdp", "0.3.0", "--untried", 'only "words" changed'], root=sibling) == 0
    assert [record.untried for record in read_records(sibling)] == ["", 'only "words" changed']


def test_changes_that_are_not_committed_stop_a_release(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "note.txt").touch()
    assert main(["engine-api", "0.3.0"], root=repository) == 1
    assert "note.txt" in capsys.readouterr().err
    assert not (repository / RECORDS).exists()


@pytest.mark.parametrize("version", ["0.3", "v0.3.0", "0.3.0.dev1", "0.03.0", "0.3.0rc1"])
def test_a_version_has_three_numbers(repository: Path, version: str) -> None:
    with pytest.raises(ReleaseError, match="is not a release version"):
        check_release(repository, "engine-api", version)


def test_a_version_below_the_declared_one_is_refused(repository: Path) -> None:
    with pytest.raises(ReleaseError, match=r"declares 0\.3\.0: 0\.2\.7 is below it"):
        check_release(repository, "engine-api", "0.2.7")


def test_bounds_of_siblings_must_accept_the_new_version(repository: Path) -> None:
    with pytest.raises(
        ReleaseError,
        match=r"temper-engine-fsdp requires temper-engine-api<0\.4,>=0\.3, "
        r"which excludes engine-api 0\.4\.0",
    ):
        check_release(repository, "engine-api", "0.4.0")


@pytest.mark.parametrize(
    ("name", "text"),
    [("speed.faster.md", "Faster."), ("notes.txt", "Hm."), ("empty.fixed.md", " \n")],
)
def test_unrecognized_or_empty_fragment_stops_the_release(
    repository: Path, name: str, text: str
) -> None:
    (repository / "packages/engine-api/changes" / name).write_text(text)
    with pytest.raises(ReleaseError, match=re.escape(name)):
        check_release(repository, "engine-api", "0.3.0")


@pytest.mark.parametrize(
    "package",
    sorted({path.parts[-3] for path in (ROOT / "packages").glob("*/changes/*.md")}),
)
def test_fragments_of_this_repository_can_be_released(package: str) -> None:
    assert list_fragments(ROOT / "packages" / package)


def test_a_sibling_between_two_releases_satisfies_bounds_without_a_pre_release(
    sibling: Path,
) -> None:
    assert main(["--record"], root=sibling) == 0
    assert read_declared_version(sibling / "packages/engine-api") == "0.3.1.dev0"
    check_release(sibling, "engine-fsdp", "0.3.0")


def test_package_without_fragments_is_not_released(repository: Path) -> None:
    with pytest.raises(ReleaseError, match="nothing to release"):
        check_release(repository, "engine-fsdp", "0.3.0")


def test_records_of_this_repository_match_its_commits() -> None:
    inside = subprocess.run(
        ["git", "rev-parse", "--is-shallow-repository"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if inside.stdout.strip() != "false":
        pytest.skip("a clone with its full history runs this")
    for record in read_records(ROOT):
        if record.commit:
            assert (
                git(ROOT, "rev-parse", f"{record.commit}:packages/{record.package}").strip()
                == record.tree
            )
        if git(ROOT, "tag", "--list", record.tag):
            assert (
                git(ROOT, "rev-parse", f"{record.tag}:packages/{record.package}").strip()
                == record.tree
            )
