"""Starts a quick run and kills its process with SIGKILL inside a given call.

python -m tests.crash MODEL FOLDER WHERE STEP. A file `died-in-WHERE` in the run's parent folder is written just before,
as the proof of where the process was.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hybridflow.trainer.checkpoint import Checkpoints
from hybridflow.workers.rollout.transformers import TransformersRollout
from tests.runs import quick, share_of_digits

OVERRIDES = ("run.checkpoint_steps=2", "run.steps=6", "algorithm.minibatches=2", "validation.every_steps=0")


def die(where: str, folder: Path) -> None:
    """The process ends here, with nothing flushed and no handler run."""
    (folder.parent / f"died-in-{where}").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def on_call(number: int, original: Callable[..., Any], act: Callable[[], None], *, after: bool) -> Callable[..., Any]:
    """`original`, but its n-th call runs `act` before it, or after it."""
    calls = 0

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number and not after:
            act()
        result = original(*args, **kwargs)
        if calls == number and after:
            act()
        return result

    return patched


def main(model: str, folder: str, where: str, step: int) -> None:
    """Patch one call, so that step number `step` (from 1) dies in it, then run."""
    run_folder, reward = Path(folder), share_of_digits
    engine: Any = TransformersRollout
    optimizer: Any = torch.optim.AdamW
    checkpoints: Any = Checkpoints

    def act() -> None:
        die(where, run_folder)

    if where == "generate":
        engine.submit = on_call(step, engine.submit, act, after=True)
    elif where == "reward":
        reward = on_call(16 * (step - 1) + 5, share_of_digits, act, after=False)
    elif where == "backward":
        torch.autograd.backward = on_call(2 * step, torch.autograd.backward, act, after=True)
    elif where == "optimizer":
        optimizer.step = on_call(2 * step, optimizer.step, act, after=True)
    elif where == "rename":
        checkpoints._publish = on_call(step // 2, checkpoints._publish, act, after=False)
    quick(Path(model), run_folder, *OVERRIDES, reward=reward)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
