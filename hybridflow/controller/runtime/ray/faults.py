"""What Ray says when something is gone, in words that name it and the remedy."""

from __future__ import annotations

import re
from pathlib import Path

from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    RayActorError,
    RayError,
    RaySystemError,
    RayTaskError,
)

from ....errors import WorkerError
from .reports import Failure, LostRowsError

GONE = "its process does not answer: it died, or its node is down or cut off from this one"
UNSAID = "connection error code 2"  # all that Ray knows of a process that ended without a word
KILLED = (
    "killed (SIGKILL; when memory runs out, by the kernel), or it exited by itself; its last words may be in {log}, "
    "on its node"
)
CRASH = "Fatal Python error:"
STORE_FULL = (
    "{what} does not fit: the object store of {whose} node is full, and so is the disk it spills to. Take fewer rows a "
    "step (data.rows_per_step, sampling.n), free that disk (/tmp/ray), or give the store more memory "
    "(ray start --object-store-memory=BYTES)."
)
NO_MODULE = (
    "its process has no module {name}, which the call's arguments need: install it on every node, or put its folder on "
    "PYTHONPATH before the run"
)
MISSING = re.compile(r"No module named '([\w.]+)'")
COLOUR = re.compile(r"\x1b\[\d+m")  # Ray's, in tracebacks


def failure_of(error: RayError, log: str) -> Failure:
    """Why a call brought no report. log: the file on its node that its process writes errors to."""
    if isinstance(error, GetTimeoutError):
        return Failure("its report did not arrive")
    if isinstance(error, ActorUnavailableError):
        return Failure(f"{GONE} ({_first_line(error)})")
    if isinstance(error, RayActorError):
        return _death(error, log)
    if isinstance(_cause(error), RaySystemError) and (missing := MISSING.search(str(error))):
        return Failure(NO_MODULE.format(name=missing[1]), COLOUR.sub("", str(error)))
    return Failure(_named(error), COLOUR.sub("", str(error)))


def unreadable(error: RayError, host: str) -> WorkerError:
    """Why rows that a host made cannot be read."""
    if isinstance(error, (ObjectStoreFullError, OutOfDiskError)):
        return WorkerError(STORE_FULL.format(what=f"what {host} made", whose="its"))
    if isinstance(error, GetTimeoutError):
        return LostRowsError(f"rows that {host} made did not come in time.")
    if isinstance(error, (RayActorError, ObjectLostError)):
        return LostRowsError(f"rows that {host} made are lost: {GONE}.")
    return WorkerError(f"rows that {host} made cannot be read: {_named(error)}")


def unsent(error: RayError, call: str) -> WorkerError:
    """Why a call could not be made."""
    if isinstance(error, (ObjectStoreFullError, OutOfDiskError)):
        return WorkerError(STORE_FULL.format(what=f"what {call} is given", whose="the driver's"))
    return WorkerError(f"{call} could not be sent: {_named(error)}")


def unstarted(error: RayError, pool: str) -> WorkerError:
    """Why a process of a pool has not come up."""
    if isinstance(error, GetTimeoutError):
        return WorkerError(f"a process of {pool} did not start in time (run.start_timeout_s).")
    *_, last = str(error).strip().splitlines()
    return WorkerError(COLOUR.sub("", f"a process of {pool} did not start: {last.strip()}\n{error}"))


def _death(error: RayActorError, log: str) -> Failure:
    crash = _crash(log)
    if crash:
        what, _, stack = crash.partition("\n")
        return Failure(f"the process died: {what}", stack.strip())
    how = _how(error)
    return Failure(f"the process died: {KILLED.format(log=log) if UNSAID in how else how}")


def _how(error: RayActorError) -> str:
    """How an actor died, in one line."""
    text = str(error)
    for mark in ("Worker exit detail:", "The actor died because", "The actor is dead because"):
        if mark in text:
            return text.split(mark)[1].split("Some common")[0].strip().splitlines()[0].rstrip(".")
    return _first_line(error)


def _crash(log: str) -> str:
    """The fatal error and stack at the end of a log, if it has one and is a file of this machine."""
    try:
        text = Path(log).read_text(errors="replace")
    except OSError:
        return ""
    _, mark, said = text.rpartition(CRASH)
    return said.split("\nExtension modules")[0].strip() if mark else ""


def _named(error: RayError) -> str:
    return f"{type(_cause(error)).__name__}: {_first_line(_cause(error))}"


def _cause(error: RayError) -> BaseException:
    cause: BaseException | None = error.cause if isinstance(error, RayTaskError) else None
    return cause or error


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
