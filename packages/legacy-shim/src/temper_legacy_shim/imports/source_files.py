"""Find Python files that mention the old package, and change them in place safely."""

import difflib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from temper_legacy_shim.errors import OutputError, UsageError
from temper_legacy_shim.imports.codemod import NotPythonError, change_imports
from temper_legacy_shim.old_paths import PACKAGE

SKIPPED = frozenset(
    {
        ".git",
        ".hg",
        ".venv",
        "venv",
        "env",
        "node_modules",
        "site-packages",
        "__pycache__",
        ".tox",
        ".nox",
    }
)
"""Names of folders without files of the user's own."""
_BUILT = frozenset({"build", "dist"})
"""Names of folders with copies of source files. They may also hold checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRemark:
    """An old name in a file, or the reason why the file was skipped."""

    line: int
    old: str
    new: str
    what_to_do: str

    @property
    def label(self) -> str:
        """Names with a colon and a blank, for a message; empty for a skipped file."""
        new = f" -> {self.new}" if self.new else ""
        return f"{self.old}{new}: " if self.old else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChange:
    path: Path
    before: bytes
    after: bytes
    remarks: tuple[FileRemark, ...]

    @property
    def needs_person(self) -> bool:
        """True if manual work is left."""
        return any(remark.what_to_do for remark in self.remarks)

    def diff(self) -> str:
        """Return the change as a patch; empty without one."""
        if self.before == self.after:
            return ""
        before, after = (_lines(content) for content in (self.before, self.after))
        name = self.path.as_posix().lstrip("/")
        name += "\t" * (
            " " in name
        )  # as git writes it, since patch ends a name at a blank otherwise
        changed = difflib.unified_diff(before, after, fromfile=f"a/{name}", tofile=f"b/{name}")
        return "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
            for line in changed
        )


def _lines(content: bytes) -> list[str]:
    """Return lines as patch counts them (not at a form feed); any bytes come through."""
    return re.findall(r"[^\n]*\n|[^\n]+", content.decode("utf-8", errors="surrogateescape"))


def change_files(paths: Sequence[Path], *, keeps_legacy: bool) -> list[FileChange]:
    """Change all Python files below the paths in memory, if they mention the old package.

    A copy of the old package itself below a path is left alone: see ``copies_below``.

    Raises:
        UsageError: a path is not there.
    """
    result = [path for given in paths for path in _python_files(given)]
    out = []
    for path in dict.fromkeys(result):
        try:
            content = path.read_bytes()
        except OSError as error:
            what_to_do = f"the file can't be read ({error.strerror}): change it by hand"
            remark = FileRemark(line=1, old="", new="", what_to_do=what_to_do)
            out.append(FileChange(path=path, before=b"", after=b"", remarks=(remark,)))
            continue
        if PACKAGE.encode() not in content:
            continue
        try:
            changed = change_imports(
                content, keeps_legacy=keeps_legacy, is_package=path.name == "__init__.py"
            )
        except NotPythonError as error:
            remark = FileRemark(
                line=1,
                old="",
                new="",
                what_to_do=f"this is no Python that can be parsed ({error}): change it by hand",
            )
            out.append(FileChange(path=path, before=content, after=content, remarks=(remark,)))
            continue
        remarks = tuple(
            FileRemark(line=r.line, old=r.old, new=r.new, what_to_do=r.what_to_do)
            for r in changed.remarks
        )
        if remarks:
            out.append(
                FileChange(path=path, before=content, after=changed.content, remarks=remarks)
            )
    return out


def is_copy(folder: Path) -> bool:
    """Check if a folder is a copy of the old package, as forks contain it."""
    return (
        folder.name == PACKAGE
        and (folder / "__init__.py").is_file()
        and (folder / "trainer").is_dir()
    )


def copies_below(paths: Sequence[Path]) -> list[Path]:
    """Return the copies of the old package below the paths, in order."""
    out = []
    for path in paths:
        for folder, names, _ in os.walk(path):
            result = [name for name in sorted(names) if is_copy(Path(folder) / name)]
            out += [Path(folder) / name for name in result]
            names[:] = sorted(
                name for name in names if name not in SKIPPED | _BUILT and name not in result
            )
    return out


def write_in_place(change: FileChange) -> None:
    """Replace a file's content, completely or not at all; its mode stays.

    Raises:
        OutputError: the file changed meanwhile, or cannot be written.
    """
    try:
        if change.path.read_bytes() != change.before:
            raise OutputError(
                f"{change.path} was changed by someone else meanwhile: run the command again."
            )
        target = change.path.resolve()
        extra = target.with_name(f".{target.name}.temper-migrate")
        extra.write_bytes(change.after)
        extra.chmod(target.stat().st_mode & 0o777)
        os.replace(extra, target)
    except OSError as error:
        raise OutputError(
            f"{change.path} can't be written ({error.strerror}): nothing of it was changed."
        ) from error


def _python_files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    if not path.is_dir():
        raise UsageError(f"{path} is not there: give Python files, or folders with some.")
    for folder, names, files in os.walk(path):
        names[:] = sorted(
            name
            for name in names
            if name not in SKIPPED | _BUILT and not is_copy(Path(folder) / name)
        )
        # Broken links and pipes have no content to change.
        paths = (Path(folder) / name for name in sorted(files) if name.endswith(".py"))
        yield from (path for path in paths if path.is_file())
