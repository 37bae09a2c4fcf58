"""Runs the benchmarks, each in a process of its own, and tables their lines. Exit 1 if a target is missed.

python -m benchmarks.run [NAME]
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

NAMES = ("driver_bytes", "group_call", "dp_balance", "packing", "logprob_memory", "grpo_vs_trl")
COMES_WITH = {
    "reshard_bytes": "the 3D-HybridEngine",
    "reshard_time": "the 3D-HybridEngine",
    "reshard_megatron": "the Megatron engine",
    "async_overlap": "the asynchronous recipes",
}


@dataclass(frozen=True)
class Result:
    """What a benchmark said of itself. value and target are None if it broke."""

    name: str
    value: float | None
    target: float | None
    ok: bool
    seconds: float


def measure(name: str) -> Result:
    """Run one benchmark and print its line. Its progress goes to stderr."""
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], stdout=subprocess.PIPE, text=True)
    seconds = time.monotonic() - start
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        print(done.stdout, end="", file=sys.stderr)
        return Result(name, None, None, False, seconds)
    print(lines[-1], flush=True)
    said = json.loads(lines[-1])
    return Result(said["name"], said["value"], said["target"], said["ok"], seconds)


def table(results: list[Result]) -> Table:
    """One row per benchmark."""
    shown = Table("benchmark", "value", "target", "", "seconds")
    for r in results:
        value = "broke" if r.value is None else f"{r.value:.3g}"
        target = "" if r.target is None else f"{r.target:.3g}"
        shown.add_row(r.name, value, target, "[green]ok" if r.ok else "[red]missed", f"{r.seconds:.0f}")
    return shown


def main(arguments: list[str]) -> int:
    """All benchmarks, or the named ones."""
    for name in arguments:
        if name in COMES_WITH:
            print(f"benchmark {name}: comes with {COMES_WITH[name]}.")
            return 0
        if name not in NAMES:
            print(f"benchmark {name}: no such name. Known: {', '.join(NAMES)}.", file=sys.stderr)
            return 2
    results = [measure(name) for name in arguments or NAMES]
    Console().print(table(results))
    return 0 if all(r.ok for r in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
