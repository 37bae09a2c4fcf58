"""Processes of this machine, for tests that end some and want to know that others have ended."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path


def running(process: int) -> bool:
    """Zombies count as gone: their parent collects them when it gets to it."""
    return _status(process)[0] not in ("", "Z")


def gone_within(processes: Sequence[int], seconds: float) -> bool:
    """Whether all of them have ended before so many seconds have passed."""
    until = time.monotonic() + seconds
    while any(running(process) for process in processes):
        if time.monotonic() > until:
            return False
        os.sched_yield()
    return True


def descendants(process: int, *names: str) -> list[int]:
    """The running processes that it, and those that they, have started, with one of the names in the command line."""
    parents = {int(folder.name): _status(int(folder.name))[1] for folder in Path("/proc").glob("[0-9]*")}
    found = [process]
    for parent in found:
        found += [child for child, its_parent in parents.items() if its_parent == str(parent)]
    return [child for child in found[1:] if running(child) and any(name in _command(child) for name in names)]


def hosts_of(process: int) -> list[int]:
    """The host processes among its descendants."""
    return descendants(process, "ray::Host")


def _command(process: int) -> str:
    return _read(process, "cmdline").replace(b"\0", b" ").decode(errors="replace")


def _status(process: int) -> tuple[str, str]:
    """State letter and parent; empty if there is no such process."""
    fields = _read(process, "stat").rpartition(b")")[2].split()
    return (fields[0].decode(), fields[1].decode()) if fields else ("", "")


def _read(process: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{process}/{name}").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
