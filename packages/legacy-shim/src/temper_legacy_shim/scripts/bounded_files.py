"""Read files of a project that may be anything: broken links, pipes, large data."""

from pathlib import Path

MAX_BYTES = 2_000_000


def is_regular(path: Path) -> bool:
    """Check for a file that can be read to its end, and not a folder, pipe or broken link."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        # Arguments of commands are looked for too, and few of them are names that a file can have.
        return False


def read_start(path: Path, *, most: int = MAX_BYTES, newline: str | None = None) -> str:
    """Return the text of a regular file, up to one character more than allowed.

    Args:
        path: Path of the file.
        most: Number of characters that are allowed.
        newline: As in ``open``; an empty string keeps the ends of lines as they are.

    Raises:
        OSError: The file cannot be opened.
    """
    with open(path, encoding="utf-8", errors="surrogateescape", newline=newline) as file:
        return file.read(most + 1)


def read_bounded(path: Path, *, most: int = MAX_BYTES) -> str | None:
    """Return the text of a file; None if it is no regular file, not readable or too long."""
    if not is_regular(path):
        return None
    try:
        text = read_start(path, most=most)
    except OSError:
        return None
    return text if len(text) <= most else None
