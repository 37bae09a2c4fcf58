"""Memory of log-probs and entropies, forward and backward: in chunks, against full logits. 4,096 tokens x 32,768 ids.

Each run is a process of its own, alternately one way and the other. Memory is the growth of the resident size over what
it was before the head; time is CPU seconds. value: full over chunked memory, of the medians. ok also asks for at most
1.4 times the CPU time and for equal gradients.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from hybridflow.workers.training.logprobs import token_logprobs

TOKENS, VOCABULARY, HIDDEN = 4096, 32768, 576
ROUNDS = 5
TARGET, TIME_AT_MOST, GRADIENTS_DIFFER_AT_MOST = 8.0, 1.4, 1e-5
WAYS = ("full", "chunked")


def full(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies by way of all logits."""
    logprobs = (hidden @ weight.t()).log_softmax(-1)
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, targets[:, None]).squeeze(1), entropies


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The same, this project's way."""
    logprobs, entropies = token_logprobs(hidden, weight, targets, entropy=True)
    assert entropies is not None
    return logprobs, entropies


def run(way: str, gradients: str) -> None:
    """One forward and backward in this process: prints bytes and seconds, and leaves the gradients in a file."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = (0.5 * torch.randn(TOKENS, HIDDEN)).requires_grad_()
    weight = (0.06 * torch.randn(VOCABULARY, HIDDEN)).requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,))
    of_logprobs, of_entropies = torch.randn(TOKENS) / TOKENS, torch.randn(TOKENS) / TOKENS
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, start = _status("VmRSS"), time.process_time()
    logprobs, entropies = {"full": full, "chunked": chunked}[way](hidden, weight, targets)
    torch.autograd.backward((logprobs * of_logprobs + entropies * of_entropies).sum())
    seconds = time.process_time() - start
    print(json.dumps({"bytes": _status("VmHWM") - before, "seconds": seconds}))
    torch.save([hidden.grad, weight.grad], gradients)


def _status(field: str) -> int:
    """Bytes, from this process's status file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def measure(folder: Path) -> dict[str, Any]:
    """All runs: raw series of both ways, and how far their gradients are apart, relative to the largest."""
    series: dict[str, dict[str, list[float]]] = {way: {"bytes": [], "seconds": []} for way in WAYS}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    for number in range(ROUNDS):
        for way in WAYS[:: 1 if number % 2 == 0 else -1]:
            command = [sys.executable, "-m", "benchmarks.logprob_memory", way, str(folder / way)]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            for key, value in json.loads(done.stdout).items():
                series[way][key].append(value)
    pairs = zip(*(torch.load(folder / way) for way in WAYS), strict=True)
    apart = max(((left - right).abs().max() / left.abs().max()).item() for left, right in pairs)
    return {**series, "gradients_differ": apart}


def main() -> None:
    """Prints the benchmark's line."""
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(Path(folder))
    ratio = {key: median(measured["full"][key]) / median(measured["chunked"][key]) for key in ("bytes", "seconds")}
    slower = 1 / ratio["seconds"]
    ok = (
        ratio["bytes"] >= TARGET and slower <= TIME_AT_MOST and measured["gradients_differ"] <= GRADIENTS_DIFFER_AT_MOST
    )
    line = {"name": "logprob_memory", "value": ratio["bytes"], "target": TARGET, "ok": ok, "time_ratio": slower}
    print(json.dumps({**line, **measured}))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        run(*sys.argv[1:])
    else:
        main()
