"""`hybridflow replay`: a failed call once more, on one inline rank, where breakpoints work."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from ..algorithms.registry import file_module
from ..controller.group import Place
from ..controller.replay import Replay
from ..controller.runtime.inline import InlineRuntime
from ..controller.trace import Trace
from .checkpoint import Checkpoints
from .console import Console

SPREAD = {
    "sequence_parallel": 1,
    "shard_size": None,
}  # keys that tell how a model is spread over ranks: here it is whole


def replay(folder: Path) -> None:
    """Make the call kept in `folder` again, with the weights of the run's newest checkpoint, or of its start, and with
    the user's files as they are now.

    Errors: HybridFlowError if the folder holds no call; otherwise whatever the call raises.
    """
    console, call = Console(), Replay.load(folder, lambda file: file_module(file, "the failed call"))
    settings = _on_one_rank(call.settings)
    runtime = InlineRuntime(Trace(on_call=console.waiting))
    group = runtime.group(call.group, call.role, settings, Place(call.group))
    handle = call.role(settings, call.group, group=group)
    try:
        group.start()
        checkpoint = Checkpoints(folder.parent / "checkpoints", 1).to_resume("auto")
        if checkpoint is not None and (checkpoint / call.group).is_dir():
            group.load(checkpoint / call.group)
        weights = checkpoint.name if checkpoint is not None else "the start of the run"
        console.say(f"{call.name} on one rank, with the weights of {weights}")
        result = getattr(handle, call.method)(*call.args, **call.kwargs)
        console.idle()
        console.say(f"{call.name} returned {result!r}: the failure does not repeat here")
    finally:
        console.idle()
        runtime.close()


def _on_one_rank(settings: Any) -> Any:
    """Settings with every model whole: results do not depend on how it is spread."""
    if not is_dataclass(settings) or isinstance(settings, type):
        return settings
    changed = {f.name: _on_one_rank(getattr(settings, f.name)) for f in fields(settings)}
    changed |= {name: value for name, value in SPREAD.items() if name in changed}
    return replace(settings, **changed)
