"""Checkpoints: whole or not there.

Data is written to a hidden folder, made durable, and renamed; only then may an older checkpoint go. Every file's size
and checksum is in the manifest, and is checked before anything is read back.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

MANIFEST = "manifest.json"
PARTIAL = ".partial-"
START = "started-from"  # names the checkpoint that run.resume=PATH went back to
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
        final, partial = self.path(step), self.folder / f"{PARTIAL}{step:06d}"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            write(partial)
            _write_manifest(partial, step, best)
            self._publish(partial, final)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            cause = _os_error(error) if isinstance(error, Exception) else None  # an interrupt stays one
            if cause is None:
                raise
            raise self._failed(step, cause) from error
        self._retire()
        return final

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, oldest first."""
        names = [path.name for path in self.folder.glob("step-*")]
        return sorted(int(name.removeprefix("step-")) for name in names if re.fullmatch(r"step-\d+", name))

    def path(self, step: int) -> Path:
        """Where the checkpoint of `step` is or would be."""
        return self.folder / f"step-{step:06d}"

    def latest(self) -> Path | None:
        """The newest checkpoint, None if there is none."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def best(self) -> int | None:
        """Step of the checkpoint with the best validation so far: the last that was the best when it was written."""
        return next((step for step in reversed(self.steps()) if _manifest(self.path(step))["best"]), None)

    def to_resume(self, resume: str) -> Path | None:
        """The verified checkpoint that run.resume (auto | never | a path) means; None to start from the beginning.

        A path is gone back to once: given again, it means the newest checkpoint made since, so that a command can be
        repeated. Errors: CheckpointError if the checkpoint is not there, or is damaged.
        """
        if resume == "never":
            return None
        given = None if resume == "auto" else Path(resume)
        found = self.latest() if given is None or given.resolve() == self.started_from() else None
        found = found or given
        if found is not None:
            verify(found)
        return found

    def started_from(self) -> Path | None:
        """The checkpoint that run.resume=PATH went back to, if it did."""
        mark = self.folder / START
        return Path(mark.read_text()) if mark.is_file() else None

    def go_back_to(self, checkpoint: Path, step: int) -> list[Path]:
        """Moves checkpoints that this one does not lead to aside; returns where they are now."""
        own = checkpoint.resolve().parent == self.folder.resolve()
        later = [self.path(each) for each in self.steps() if not own or each > step]
        moved = [move_aside(path) for path in later]
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / START).write_text(str(checkpoint.resolve()))
        return moved

    def _publish(self, partial: Path, final: Path) -> None:
        """The one moment at which a checkpoint comes into being."""
        if final.exists():
            move_aside(final)
        partial.rename(final)
        _sync_folder(self.folder)

    def _retire(self) -> None:
        for leftover in self.folder.glob(f"{PARTIAL}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        best = self.best()
        for step in self.steps()[: -self.kept]:
            if step != best:
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
        manifest = _manifest(checkpoint)
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


def move_aside(folder: Path) -> Path:
    """Rename a folder to the first free `folder.N`; nothing of an earlier run is ever overwritten."""
    number = next(n for n in range(1, 1_000_000) if not folder.with_name(f"{folder.name}.{n}").exists())
    return folder.rename(folder.with_name(f"{folder.name}.{number}"))


def _write_manifest(folder: Path, step: int, best: bool) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        _sync_file(path)
    listed = {str(path.relative_to(folder)): (path.stat().st_size, _checksum(path)) for path in files}
    (folder / MANIFEST).write_text(json.dumps({"step": step, "best": best, "files": listed}, indent=1))
    _sync_file(folder / MANIFEST)


def _manifest(checkpoint: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((checkpoint / MANIFEST).read_text())
    return content


def _os_error(error: BaseException | None) -> OSError | None:
    """The operating system's error at the root of another, such as a full disk under a library's own report."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


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
