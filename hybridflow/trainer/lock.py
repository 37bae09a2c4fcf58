"""One process per run folder: two that train into one folder would mix their metrics and checkpoints."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from ..errors import ConfigError


class FolderLock:
    """Holds a run folder for this process until `release`, or until the process ends, however that is."""

    def __init__(self) -> None:
        self._descriptor: int | None = None

    def take(self, folder: Path) -> None:
        """Make the folder if need be, and hold it. Errors: ConfigError if it can't be made, or is held by another."""
        self.release()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise ConfigError(f"run.dir={folder}: {error.strerror}; give a folder that can be written to.") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.read(descriptor, 20).decode().strip() or "unknown"
            os.close(descriptor)
            raise ConfigError(
                f"run.dir={folder} is in use by process {owner}: wait for it, end it, or give another run.dir."
            ) from error
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._descriptor = descriptor

    def release(self) -> None:
        """Let go, if it is held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
