"""Makes the environment NAME from its pins and links it into this clone as .venv (core) or .venv-NAME.

    python3.11 requirements/environment.py NAME        # a file requirements/NAME.txt

Environments live in $HYBRIDFLOW_ENVS (default: $XDG_CACHE_HOME/hybridflow or ~/.cache/hybridflow), each under a key
made from its pins, the interpreter and the platform. So a second clone with the same pins installs nothing, and changed
pins make a new environment beside the old one. An environment knows no clone: the clone goes on PYTHONPATH.
Needs the standard library only.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
LINES_SHOWN_ON_FAILURE = 30


def pins(file: Path) -> list[str]:
    """The requirements of `file` and of the files it includes, without comments."""
    found: list[str] = []
    for line in file.read_text().splitlines():
        requirement = line.partition("#")[0].strip()
        if requirement.startswith("-r "):
            found += pins(file.parent / requirement[3:].strip())
        elif requirement:
            found.append(requirement)
    return sorted(found)


def home() -> Path:
    """The folder that holds the environments of all clones."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("HYBRIDFLOW_ENVS") or caches / "hybridflow").absolute()


def key(requirements: list[str]) -> str:
    """What the environment depends on, in 12 hex digits."""
    made_of = [sys.implementation.name, platform.python_version(), sys.platform, platform.machine(), *requirements]
    return hashlib.sha256("\n".join(made_of).encode()).hexdigest()[:12]


def usable(folder: Path) -> bool:
    """True if the installation went to its end and the interpreter behind it is still there."""
    python = folder / "bin" / "python"
    return (folder / ".complete").exists() and python.exists() and subprocess.call([python, "-c", ""]) == 0


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """One process at a time; released by the system if the process dies."""
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def install(name: str, folder: Path) -> None:
    """A new environment in `folder`, marked complete at the end. pip's output goes to a log beside it."""
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    log = folder.with_suffix(".log")
    pip = [
        str(folder / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--no-deps",  # the files name all packages; what a package asks for beside them is left out on purpose
        "-r",
        str(HERE / f"{name}.txt"),
    ]
    with log.open("w") as output:
        code = subprocess.call(pip, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    if code:
        last = "\n".join(log.read_text(errors="replace").splitlines()[-LINES_SHOWN_ON_FAILURE:])
        sys.exit(f"{last}\nenvironment {name}: pip failed; its whole output is in {log}")
    (folder / ".complete").touch()


def link(target: Path, name: str) -> None:
    """Points this clone's link at the environment."""
    path = HERE.parent / (".venv" if name == "core" else f".venv-{name}")
    if path.is_symlink() and path.readlink() == target:
        return
    if path.exists() and not path.is_symlink():
        sys.exit(f"environment {name}: {path} is in the way and no link made here; move it away.")
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.symlink_to(target)
    fresh.replace(path)


def main(name: str) -> None:
    """Install unless it is there, then link."""
    file = HERE / f"{name}.txt"
    if not file.exists():
        sys.exit(f"environment {name}: no {file}; there are {', '.join(sorted(f.stem for f in HERE.glob('*.txt')))}.")
    requirements = pins(file)
    folder = home() / f"{name}-{key(requirements)}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_suffix(".lock")):
        if not usable(folder):
            print(f"environment {name}: installing {len(requirements)} packages into {folder}", flush=True)
            start = time.monotonic()
            install(name, folder)
            print(f"environment {name}: ready in {time.monotonic() - start:.0f} s", flush=True)
    link(folder, name)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
