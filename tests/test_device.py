"""What is known of the device."""

from __future__ import annotations

import random
import socket

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hybridflow import device
from hybridflow.errors import EngineError

pytestmark = pytest.mark.unit


def test_without_an_accelerator_everything_is_a_cpu() -> None:
    if device.is_accelerated():
        pytest.skip("this machine has an accelerator")
    assert device.device_type() == "cpu"
    assert device.current_device() == torch.device("cpu")
    assert device.collective_backend() == "gloo"
    assert device.device_count() == 1


def test_there_is_memory_and_not_all_of_it_is_free() -> None:
    memory = device.memory()
    assert 0 < memory.free < memory.total


def test_the_process_group_of_one_rank_is_made_once() -> None:
    device.init_process_group_once()
    group = dist.group.WORLD
    device.init_process_group_once()
    assert dist.group.WORLD is group
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    total = torch.ones(2)
    dist.all_reduce(total)
    assert total.tolist() == [1, 1]


def test_ranks_that_do_not_come_in_time_are_an_error_that_says_who_waited_where() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(EngineError, match=rf"rank 0 of 2 waited 0.5 s for the others at 127.0.0.1:{port}"):
        device.join_process_group("127.0.0.1", port, 0, 2, timeout_s=0.5)


def test_a_seed_repeats_every_global_generator() -> None:
    draws = []
    for _ in range(2):
        device.seed_everything(3)
        draws.append((torch.rand(2).tolist(), np.random.rand(), random.random()))
    assert draws[0] == draws[1]
