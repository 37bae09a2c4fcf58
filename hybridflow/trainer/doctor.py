"""`hybridflow doctor`: what this machine has, and every part tried on it, with what to type where one does not work."""

from __future__ import annotations

import importlib
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from .. import __version__
from ..algorithms.config import AlgorithmConfig
from ..batch import Batch
from ..columns import Ragged
from ..engines import Sampling
from ..workers.engine_table import ROLLOUT, TRAIN
from ..workers.models.config import ModelConfig
from ..workers.models.tiny import save_tiny_model
from ..workers.rollout.config import TransformersConfig
from ..workers.training.config import FSDPConfig

NEEDED = (
    "torch",
    "transformers",
    "numpy",
    "hydra-core",
    "datasets",
    "math-verify",
    "ray",
    "reasoning-gym",
    "tensorboard",
)
OPTIONAL = {"wandb": "run.trackers=[wandb]"}  # package -> what needs it
OWN_PACKAGE = ("vllm",)  # engines that need a package of their name
GIB = 2**30


def examine() -> int:
    """Print the findings, one a line; returns 0 if all that a run needs works, else 1."""
    print(f"hybridflow {__version__} on Python {platform.python_version()}, {platform.platform()}")
    print(f"python: {sys.executable}")
    works = [_package(name) for name in NEEDED]
    for name, use in OPTIONAL.items():
        _package(name, use)
    works.append(_tried("device", _device))
    for group, engines in (("training", TRAIN), ("rollout", ROLLOUT)):
        for name, spec in engines.items():
            if name in OWN_PACKAGE and find_spec(name) is None:
                print(f"{group}={name}: not installed, needed for it alone: pip install {name}")
            else:
                works.append(_tried(f"{group}={name}", partial(_importable, spec)))
    works.append(
        _tried("run.runtime=ray", partial(_importable, "hybridflow.controller.runtime.ray.runtime:RayRuntime"))
    )
    works.append(_tried("one step with a tiny model", _step))
    print("all a run needs works" if all(works) else "not everything works: see above")
    return 0 if all(works) else 1


def _package(name: str, use: str | None = None) -> bool:
    try:
        print(f"{name}: {version(name)}")
    except PackageNotFoundError:
        print(f"{name}: not installed{f', needed for {use} alone' if use else ''}: pip install {name}")
        return False
    return True


def _tried(what: str, attempt: Callable[[], str]) -> bool:
    """Print what came of `attempt`; an error of any kind is a finding here."""
    try:
        print(f"{what}: {attempt()}")
    except ModuleNotFoundError as error:
        print(f"{what}: fails: no module {error.name}: pip install -r requirements/core.txt")
        return False
    except Exception as error:
        print(f"{what}: fails: {type(error).__name__}: {error}")
        return False
    return True


def _device() -> str:
    import torch

    from .. import device

    memory = device.memory()
    kind = "CPU" if device.device_type() == "cpu" else f"{device.device_count()} x {device.device_type()}"
    return (
        f"{kind}, {memory.free / GIB:.1f} of {memory.total / GIB:.1f} GiB free; "
        f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"
    )


def _importable(spec: str) -> str:
    module, name = spec.split(":")
    getattr(importlib.import_module(module), name)
    return "works"


def _step() -> str:
    """Sample with a tiny random model, and take an optimizer step on the samples."""
    from ..algorithms.objective import PolicyObjective
    from ..algorithms.registry import Loss
    from ..workers.rollout.transformers import TransformersRollout
    from ..workers.training.fsdp import FSDPEngine

    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        model = ModelConfig(path=str(save_tiny_model(Path(folder), 0, hidden=32, layers=1)))
        trainer = FSDPEngine(model, FSDPConfig())
        sampler = TransformersRollout(model, TransformersConfig(max_concurrent=8), seed=0, dtype=trainer.compute_dtype)
    sampler.sync(trainer.parameters(), 0)
    prompts = Batch({"prompt_ids": Ragged.from_rows([[10, 11], [12, 13, 14]], np.int64), "group_id": np.arange(2)})
    samples = sampler.generate(prompts, Sampling(n=2, max_new_tokens=8))
    columns = {"prompt_ids": prompts.take(np.repeat(np.arange(2), 2)).column("prompt_ids")}
    batch = Batch({**columns, **{name: samples.column(name) for name in samples.names}})
    metrics = trainer.step(batch, PolicyObjective(Loss("sft"), AlgorithmConfig(), 8))
    tokens = len(samples.ragged("response_ids").values)
    return f"{tokens} tokens sampled, loss {metrics['loss']:.3f}, {time.perf_counter() - began:.1f} s"
