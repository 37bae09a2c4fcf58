"""Starts a quick run and kills its process with SIGKILL inside a given call.

python -m tests.crash MODEL FOLDER WHERE STEP [overrides]: of PPO if WHERE is critic, else of GRPO. A file
`died-in-WHERE` in the run's parent folder is written just before, as the proof of where the process was.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from hybridflow.recipes import grpo, ppo
from hybridflow.trainer.checkpoint import Checkpoints
from hybridflow.workers.actor import Actor
from hybridflow.workers.rollout.transformers import TransformersRollout
from tests.processes import descendants
from tests.runs import quick, share_of_digits

OVERRIDES = ("run.checkpoint_steps=2", "run.steps=6", "algorithm.minibatches=2", "validation.every_steps=0")


def mark(where: str, folder: Path) -> None:
    """The proof: names the process, and the cluster's that it has started."""
    processes = [os.getpid(), *descendants(os.getpid(), "ray::Host", "/raylet ", "/gcs_server ")]
    (folder.parent / f"died-in-{where}").write_text(" ".join(map(str, processes)))


def die(where: str, folder: Path) -> None:
    """The process ends here, with nothing flushed and no handler run."""
    mark(where, folder)
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


def arm(worker: Any, where: str, folder: Path) -> None:
    """On a rank of a running group: the next call of one kind ends its process. In `rename`, that is up to others."""

    def act() -> None:
        die(where, folder)

    if where == "generate":  # the third token
        model = worker._rollout.model
        model.forward = on_call(3, model.forward, act, after=True)
    elif where == "reward":
        worker._scorer.score = on_call(1, worker._scorer.score, act, after=False)
    elif where == "forward":
        worker._train._score = on_call(1, worker._train._score, act, after=True)
    elif where == "backward":
        torch.autograd.backward = on_call(1, torch.autograd.backward, act, after=True)
    elif where == "optimizer":
        register_optimizer_step_post_hook(lambda *_: act())
    elif where == "shard":  # its bytes are written, and not yet durable
        os.fsync = on_call(1, os.fsync, act, after=False)
    elif where == "rename":
        mark(where, folder)


def main(model: str, folder: str, where: str, step: int, overrides: Sequence[str]) -> None:
    """Patch one call, so that step number `step` (from 1) dies in it, then run; of `nowhere`, run."""
    run_folder, reward = Path(folder), share_of_digits
    engine: Any = TransformersRollout
    optimizer: Any = torch.optim.AdamW
    actor: Any = Actor
    checkpoints: Any = Checkpoints

    def act() -> None:
        die(where, run_folder)

    if where == "generate":
        engine.submit = on_call(step, engine.submit, act, after=True)
    elif where == "call":  # of a controller whose ranks have begun to sample
        actor.sample = on_call(step, actor.sample, act, after=True)
    elif where == "reward":
        reward = on_call(16 * (step - 1) + 5, share_of_digits, act, after=False)
    elif where == "backward":
        torch.autograd.backward = on_call(2 * step, torch.autograd.backward, act, after=True)
    elif where == "optimizer":
        optimizer.step = on_call(2 * step, optimizer.step, act, after=True)
    elif where == "critic":  # its two optimizer steps come before the policy's two
        optimizer.step = on_call(4 * (step - 1) + 1, optimizer.step, act, after=True)
    elif where == "rename":
        checkpoints._publish = on_call(step // 2, checkpoints._publish, act, after=False)
    quick(Path(model), run_folder, *OVERRIDES, *overrides, driver=ppo if where == "critic" else grpo, reward=reward)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5:])
