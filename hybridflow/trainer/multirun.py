"""A sweep: one run after the other, each in a process and a folder of its own."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from .overrides import jobs_of, swap
from .tracking import MetricsFile
from .tree import Config

IN_FOLDER_NAMES = "=,.+-_[]"


@dataclass(frozen=True)
class Job:
    """One combination: its swept keys as text, all its overrides, the configuration these make."""

    name: str
    words: tuple[str, ...]
    config: Config


def multirun(recipe: str, words: Sequence[str], configure: Callable[[Sequence[str]], Config]) -> int:
    """Run `recipe` for every combination of the swept values. Every combination is checked before the first starts.

    Folders are run.dir/KEY=VALUE,... unless run.dir itself is swept. Returns the largest exit code.
    Errors: ConfigError for a combination that is none.
    """
    jobs = jobs_in(words, configure)
    results = []
    for number, job in enumerate(jobs, 1):
        print(f"run {number} of {len(jobs)}: {job.name}", flush=True)
        began = time.perf_counter()
        code = _run([sys.executable, "-m", "hybridflow", recipe, *job.words])
        results.append((job, code, time.perf_counter() - began))
    print(summary(results))
    return max(code for _, code, _ in results)


def jobs_in(words: Sequence[str], configure: Callable[[Sequence[str]], Config]) -> list[Job]:
    """The runs of a sweep, in order."""
    jobs = []
    for swept in jobs_of(words):
        name = ",".join(f"{key}={value}" for key, value in swept.items())
        own = list(swap(words, swept))
        config = configure(own)
        if "run.dir" not in swept:
            own.append(f"run.dir={Path(config.run.dir) / quote(name, safe=IN_FOLDER_NAMES)}")
            config = configure(own)
        jobs.append(Job(name, tuple(own), config))
    return jobs


def summary(results: Sequence[tuple[Job, int, float]]) -> str:
    """One line a run: how it ended, its last validation number, seconds, folder."""
    width = max(len(job.name) for job, _, _ in results)
    lines = []
    for job, code, seconds in results:
        ended = "done" if code == 0 else f"exit {code}"
        lines.append(
            f"{job.name:<{width}}  {ended:<8}  {_validated(job.config)}  {seconds:.0f} s  {job.config.run.dir}"
        )
    return "\n".join(lines)


def _validated(config: Config) -> str:
    name = f"val/{config.validation.metric}"
    values = [row[name] for row in MetricsFile(Path(config.run.dir) / "metrics.jsonl").rows() if name in row]
    return f"{name} {values[-1]:.4f}" if values else f"{name} -"


def _run(command: Sequence[str]) -> int:
    """Exit code of a process. Interrupted, it is waited for, so that it ends its own way."""
    with subprocess.Popen(command) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.wait()
            raise
