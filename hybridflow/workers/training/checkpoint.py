"""What a training engine writes to disk: sharded checkpoints to go on from, and Hugging Face folders to use."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.tensor import DTensor

from ...errors import CheckpointError
from ..models.config import ModelConfig
from ..models.loading import load_tokenizer, quiet, source_dtype
from .heads import Head

STATE = "engine.json"
METADATA = ".metadata"


def save(folder: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Each rank writes its parts of `tensors`, the first one also `state` (JSON). Errors: CheckpointError."""
    with _explained(folder):
        state_dict_saver.save(dict(tensors), checkpoint_id=folder)
        if dist.get_rank() == 0:
            (folder / STATE).write_text(json.dumps(state))
    dist.barrier()


def load(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Fills `tensors` in place, from a checkpoint of any number of ranks, and returns its state.

    Errors: CheckpointError naming the file that is missing or cut short, or the tensor that does not fit.
    """
    with _explained(folder / STATE):
        state: dict[str, Any] = json.loads((folder / STATE).read_text())
    with _explained(folder / METADATA):
        metadata = FileSystemReader(folder).read_metadata()
    _check_files(folder, metadata.storage_data.values())
    with _explained(folder):
        state_dict_loader.load(dict(tensors), checkpoint_id=folder)
    return state


def export(folder: Path, parameters: Iterable[tuple[str, Tensor]], model: ModelConfig, path: str, head: Head) -> None:
    """A Hugging Face folder: the model at `path` with these parameters, in the dtype it came in, and its tokenizer."""
    dtype = source_dtype(head.config(path, model))
    first, weights = dist.get_rank() == 0, {}
    for name, parameter in parameters:
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if first:
            weights[name] = whole.detach().to("cpu", dtype)
    if first:
        with quiet():
            head.empty(path, model, dtype).save_pretrained(folder, state_dict=weights)
        load_tokenizer(model).save_pretrained(folder)
    dist.barrier()


def _check_files(folder: Path, parts: Iterable[Any]) -> None:
    """Errors: CheckpointError for a file that is not there or shorter than what the metadata says lies in it."""
    ends: dict[str, int] = {}
    for part in parts:
        ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
    for name, end in ends.items():
        file = folder / name
        size = file.stat().st_size if file.is_file() else None
        if size is None or size < end:
            fault = "is missing" if size is None else f"has {size} bytes where {end} were written"
            raise CheckpointError(f"{file} {fault}: this checkpoint is damaged; resume from another.")


@contextmanager
def _explained(where: Path) -> Iterator[None]:
    """Whatever goes wrong, as a CheckpointError that says where, with the first cause of torch's own report."""
    try:
        yield
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise CheckpointError(f"{where}: {type(cause).__name__}: {cause}") from cause
    except Exception as error:
        raise CheckpointError(f"{where}: {type(error).__name__}: {error}") from error
