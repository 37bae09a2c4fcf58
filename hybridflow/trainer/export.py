"""The exported model of a run: `export/`, whole or not there, and the step that it is of."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

STEP_FILE = "trained_steps.txt"


def export(folder: Path, step: int, write: Callable[[Path], None]) -> None:
    """`write(path)` fills a Hugging Face folder, which then takes the place of an earlier one at once."""
    partial, earlier = folder.with_name(f".{folder.name}.partial"), folder.with_name(f".{folder.name}.earlier")
    for leftover in (partial, earlier):
        shutil.rmtree(leftover, ignore_errors=True)
    write(partial)
    (partial / STEP_FILE).write_text(f"{step}\n")
    if folder.exists():
        folder.rename(earlier)
    partial.rename(folder)
    shutil.rmtree(earlier, ignore_errors=True)


def exported_step(folder: Path) -> int | None:
    """The step that the exported model is of; None if there is none."""
    file = folder / STEP_FILE
    return int(file.read_text()) if file.is_file() else None
