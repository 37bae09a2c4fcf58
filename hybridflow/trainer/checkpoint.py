"""Checkpoints: whole or not there.

Data is written to a hidden folder, made durable, and renamed; only then may an older checkpoint go. Every file's size
and checksum is in the manifest, and is checked before anything is read back.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

from ..errors import CheckpointError

MANIFEST = "manifest.json"
PARTIAL = ".partial-"
CHUNK_BYTES = 1 << 20


class Checkpoints:
    """The checkpoints of one run folder: `step-000050/` each.

    kept: how many of the newest stay, beside the best.
    """

    def __init__(self, folder: Path, kept: int) -> None:
        self.folder = folder
        self.kept = kept

    def save(self, step: int, write: Callable[[Path], None], *, best: bool = False) -> Path:
        """`write(folder)` fills a checkpoint, which then appears under its final name at once.

        Errors: CheckpointError if it can't be written; earlier checkpoints are untouched.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        final, partial = self.path(step), self.folder / f"{PARTIAL}{step:06d}"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir()
            write(partial)
            _write_manifest(partial, step)
            self._publish(partial, final)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise self._failed(step, error) from error
        if best:
            self._mark_best(step)
        self._retire()
        return final

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        return sorted(int(path.name.removeprefix("step-")) for path in self.folder.glob("step-*"))

    def path(self, step: int) -> Path:
        """Where the checkpoint of `step` is or would be."""
        return self.folder / f"step-{step:06d}"

    def latest(self) -> Path | None:
        """The newest checkpoint, None if there is none."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def best(self) -> int | None:
        """Step of the checkpoint with the best validation so far."""
        mark = self.folder / "best"
        return int(mark.read_text()) if mark.is_file() else None

    def _publish(self, partial: Path, final: Path) -> None:
        """The one moment at which a checkpoint comes into being."""
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        _sync_folder(self.folder)

    def _mark_best(self, step: int) -> None:
        mark = self.folder / "best.new"
        mark.write_text(str(step))
        mark.replace(self.folder / "best")

    def _retire(self) -> None:
        for leftover in self.folder.glob(f"{PARTIAL}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        for step in self.steps()[: -max(1, self.kept)]:
            if step != self.best():
                shutil.rmtree(self.path(step))

    def _failed(self, step: int, error: OSError) -> CheckpointError:
        latest = self.latest()
        stands = f"The last complete one, {latest.name}, is untouched" if latest else "There is no earlier one"
        remedy = "free some space" if error.errno == errno.ENOSPC else "mend the cause"
        return CheckpointError(
            f"the checkpoint of step {step} could not be written to {self.folder}: {error.strerror or error}. "
            f"{stands}; {remedy} and give the same command again to go on from there."
        )


def verify(checkpoint: Path) -> None:
    """Every file there, of its size and checksum. Errors: CheckpointError naming the file and the remedy."""
    remedy = f"Remove {checkpoint} to go on from an earlier checkpoint, or name one with run.resume=PATH."
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint} is no complete checkpoint: {MANIFEST}: {error}. {remedy}") from error
    for name, (size, checksum) in manifest["files"].items():
        path = checkpoint / name
        if not path.is_file():
            raise CheckpointError(f"checkpoint damaged: {path} is missing. {remedy}")
        if path.stat().st_size != size:
            raise CheckpointError(f"checkpoint damaged: {path} has {path.stat().st_size} bytes, not {size}. {remedy}")
        if _checksum(path) != checksum:
            raise CheckpointError(f"checkpoint damaged: the content of {path} is not what was written. {remedy}")


def _write_manifest(folder: Path, step: int) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        _sync_file(path)
    listed = {str(path.relative_to(folder)): (path.stat().st_size, _checksum(path)) for path in files}
    (folder / MANIFEST).write_text(json.dumps({"step": step, "files": listed}, indent=1))
    _sync_file(folder / MANIFEST)


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return value


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
