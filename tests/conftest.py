"""Fixtures shared by the tests."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is; models this small gain nothing from more

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import ray_cluster as cluster
from tests.models import tiny_model_folder

settings.register_profile("project", deadline=None, derandomize=True)  # the same examples each time, on any machine
settings.load_profile("project")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a tiny random Qwen2 and a character tokenizer."""
    return tiny_model_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A Ray cluster of one node with 64 device slots, which this process has joined."""
    cluster.start()
    yield
    cluster.stop()
