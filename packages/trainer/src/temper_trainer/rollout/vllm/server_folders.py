"""Folders of a server process, made and removed by the process that starts it."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from temper_engine_api.process_folders import (
    SHARED_MEMORY,
    make_folder_path,
    make_temporary_folder,
    remove_folder,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFolders:
    """Folders of a server, which its parent makes and removes.

    The server itself may be killed at any time. If its parent is killed too, the next start removes
    the folders: their names contain the parent's process.
    """

    files: Path
    """Temporary directory of the server. Each start of vLLM leaves a file `vllm_dist_*` there."""
    sockets: Path | None
    """Folder of vLLM's sockets, which stay if a tensor-parallel server is killed. It is in shared
    memory, because their paths are limited to 107 characters and a temporary directory may have a
    long name. None where /dev/shm does not exist or cannot be written.
    """

    @classmethod
    def make(cls) -> "ServerFolders":
        """Make the folders of a server."""
        files = make_temporary_folder("server")
        if not os.access(SHARED_MEMORY, os.W_OK):
            return cls(files=files, sockets=None)
        sockets = make_folder_path("ipc", root=SHARED_MEMORY)
        try:
            sockets.mkdir(mode=0o700)
        except OSError:
            remove_folder(files)
            raise
        return cls(files=files, sockets=sockets)

    def remove(self) -> None:
        """Remove the folders, after the server and its workers have ended. Idempotent."""
        for folder in filter(None, (self.files, self.sockets)):
            remove_folder(folder)

    def make_environment(self) -> dict[str, str]:
        """Return this process's environment with the folders, for the server."""
        environment = os.environ | {"TMPDIR": str(self.files)}
        if self.sockets is None:
            # Not in `files`, where their paths could be too long.
            sockets = tempfile.gettempdir()
        else:
            sockets = str(self.sockets)
        environment.setdefault("VLLM_RPC_BASE_PATH", sockets)
        return environment
