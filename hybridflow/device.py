"""The only file that names an accelerator: what this process computes on, how its ranks talk, what memory it has."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore

from .errors import EngineError


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of the device this process computes on, in bytes; on a CPU that of the machine."""

    total: int
    free: int


def device_type() -> str:
    """`cuda` (also for ROCm), `npu`, `xpu`, ... where there is such a device, else `cpu`."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator else "cpu"


def is_accelerated() -> bool:
    """Whether there is anything but a CPU."""
    return device_type() != "cpu"


def current_device() -> torch.device:
    """The device this process computes on."""
    return (
        torch.device(device_type(), torch.accelerator.current_device_index())
        if is_accelerated()
        else torch.device("cpu")
    )


def device_count() -> int:
    """Accelerators of this machine; a CPU counts as one device."""
    return torch.accelerator.device_count() if is_accelerated() else 1


def collective_backend() -> str:
    """Backend of torch.distributed for CPU tensors and, beside it, for those of the accelerator."""
    kind = device_type()
    return "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"


def init_process_group_once() -> None:
    """The default process group: the one there is, else one of a single rank, which needs no rendezvous."""
    if not dist.is_initialized():
        dist.init_process_group(collective_backend(), store=HashStore(), rank=0, world_size=1)


def join_process_group(address: str, port: int, rank: int, ranks: int, timeout_s: float) -> None:
    """Makes the default process group of `ranks` processes, which meet at the port that rank 0 opens on `address`; this
    process has chosen its device before. timeout_s: how long to wait for the others, here and in its collectives.

    Errors: EngineError if they do not all come in time.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        store = TCPStore(address, port, ranks, is_master=rank == 0, timeout=timeout)
        dist.init_process_group(collective_backend(), store=store, rank=rank, world_size=ranks, timeout=timeout)
    except dist.DistError as error:
        raise EngineError(
            f"rank {rank} of {ranks} waited {timeout_s:g} s for the others at {address}:{port}: {error}"
        ) from error


def is_collective_error(error: BaseException) -> bool:
    """Whether an error, or the one that it was raised from, tells of another rank that is gone, and not of a fault of
    this one."""
    marks = ("gloo/", "NCCL", "Connection closed by peer", "Connection reset", "[c10d]")
    said = type(error) is RuntimeError and any(mark in str(error) for mark in marks)  # gloo's have no class
    cause = error.__cause__
    return said or isinstance(error, dist.DistError) or (cause is not None and is_collective_error(cause))


def use_threads(count: int) -> None:
    """CPU threads of this process."""
    torch.set_num_threads(count)


def memory() -> DeviceMemory:
    """What the device has and what is free of it now."""
    if is_accelerated():
        free, total = torch.accelerator.get_memory_info()
        return DeviceMemory(total, free)
    page = os.sysconf("SC_PAGE_SIZE")
    return DeviceMemory(os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page)


def use_deterministic_algorithms() -> None:
    """From here on operations repeat bit for bit; one that cannot raises."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


@contextmanager
def kept_state() -> Iterator[None]:
    """Puts back Python's, numpy's and torch's CPU generators and the number of CPU threads, which a library in this
    process sets for its own use."""
    random_states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    try:
        yield
    finally:
        random.setstate(random_states[0])
        np.random.set_state(random_states[1])
        torch.set_rng_state(random_states[2])
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)


def seed_everything(seed: int) -> None:
    """Seeds torch (all devices), numpy's and Python's global generators."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
