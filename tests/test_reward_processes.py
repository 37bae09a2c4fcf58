"""Reward functions in worker processes: whatever one of them does, only its own row is lost, and in time."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from hybridflow.algorithms.registry import resolve
from hybridflow.batch import Batch
from hybridflow.errors import BatchError, ConfigError, RewardError
from hybridflow.workers.reward_calls import Chunk, RewardFunction
from hybridflow.workers.reward_functions import math
from hybridflow.workers.reward_pool import WorkerPool
from hybridflow.workers.scoring import RewardConfig, Scorer

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 0.4


@pytest.fixture
def scorer() -> Iterator[Callable[..., Scorer]]:
    """A scorer of functions named as they are, in two workers."""
    made: list[Scorer] = []

    def make(*functions: Callable[..., Any], timeout_s: float = TIMEOUT_S, workers: int = 2) -> Scorer:
        config = RewardConfig(workers=workers, timeout_s=timeout_s, max_error_fraction=1.0)
        made.append(Scorer([(fn.__name__, fn, 1.0) for fn in functions], config))
        return made[-1]

    yield make
    for each in made:
        each.close()


def rows(count: int, **columns: Any) -> Batch:
    return Batch({"x": np.arange(count), **columns}, np.arange(count))


def lost(out: Batch) -> list[int]:
    return np.flatnonzero(~out["keep"]).tolist()


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


def check_only_row_5_is_lost(out: Batch, reason: str) -> None:
    """Of 24 rows, where the function returns x."""
    assert lost(out) == [5]
    assert reason in out["drop_reason"][5]
    assert out["reward"].tolist() == [0.0 if x == 5 else float(x) for x in range(24)]


def test_rows_are_scored_as_in_the_driver(scorer: Callable[..., Scorer]) -> None:
    def plain(x: int, text: str) -> float:
        return x + len(text)

    async def waits(x: int, tokens: Any) -> dict[str, float]:
        await asyncio.sleep(0)
        return {"reward": float(tokens.sum()), "twice": 2 * x}

    batch = rows(50, text=["a" * i for i in range(50)], tokens=[np.arange(i) for i in range(50)])
    here, there = (scorer(plain, waits, workers=n, timeout_s=30.0).score(batch) for n in (0, 2))
    for name in ("reward", "reward/plain", "reward/waits", "keep"):
        assert here[name].tolist() == there[name].tolist()
    same = {name for name in here.metrics if name != "time/scoring"}
    assert {name: here.metrics[name] for name in same} == {name: there.metrics[name] for name in same}


# ---- calls that hang
def test_case_18_a_call_that_hangs_costs_its_row_and_no_more(scorer: Callable[..., Scorer]) -> None:
    def f(x: int) -> float:
        if x == 5:
            threading.Event().wait()
        return x

    started = time.monotonic()
    out = scorer(f).score(rows(24))
    check_only_row_5_is_lost(out, "reward f: TimeoutError after 0.4 s")
    assert time.monotonic() - started < 3
    assert (out.metrics["reward/errors"], out.metrics["reward/timeouts"]) == (1, 1)


def test_case_18_an_expression_that_never_ends_is_an_error_not_a_zero(scorer: Callable[..., Scorer]) -> None:
    batch = Batch({"response": ["\\boxed{4}", "\\boxed{9^{9^{9^9}}-1}", "\\boxed{5}"], "answer": ["4", "4", "4"]})
    out = scorer(math, timeout_s=3.0).score(batch)
    assert out["reward"].tolist() == [1.0, 0.0, 0.0]
    assert out["keep"].tolist() == [True, False, True]
    assert out["drop_reason"][1] == "reward math: TimeoutError after 3 s"


def test_swallowing_the_time_out_does_not_help(scorer: Callable[..., Scorer]) -> None:
    def f(x: int) -> float:
        if x == 5:
            try:
                threading.Event().wait()
            except BaseException:
                return 1.0
        return x

    check_only_row_5_is_lost(scorer(f).score(rows(24)), "TimeoutError after 0.4 s")


def test_code_that_no_alarm_interrupts_is_killed(scorer: Callable[..., Scorer]) -> None:
    def f(x: int) -> float:
        return float(sum(range(10**13))) if x == 5 else x

    check_only_row_5_is_lost(scorer(f).score(rows(24)), "TimeoutError after 0.4 s")


def test_a_function_that_uses_the_alarm_itself_is_still_ended(scorer: Callable[..., Scorer]) -> None:
    def f(x: int) -> float:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(0)
        if x == 5:
            threading.Event().wait()
        return x

    check_only_row_5_is_lost(scorer(f).score(rows(24)), "TimeoutError after 0.4 s")


def test_the_time_a_score_takes_is_bounded_when_every_call_hangs(scorer: Callable[..., Scorer]) -> None:
    def f(x: int) -> float:
        threading.Event().wait()
        return 0.0

    started = time.monotonic()
    assert lost(scorer(f).score(rows(8))) == list(range(8))
    assert time.monotonic() - started < 8 * TIMEOUT_S / 2 + 2


def test_the_traceback_shows_where_a_call_hung() -> None:
    def f(x: int) -> float:
        return threading.Event().wait()

    scorer = Scorer([("f", f, 1.0)], RewardConfig(workers=1, timeout_s=TIMEOUT_S))
    with pytest.raises(RewardError, match=r"1 of 1 rows .* 1 x reward f: TimeoutError after 0.4 s[^$]*in f\n"):
        scorer.score(rows(1))
    scorer.close()


# ---- workers that die
@pytest.mark.parametrize("code", [0, 3])
def test_a_call_that_ends_its_process_costs_its_row(scorer: Callable[..., Scorer], code: int) -> None:
    def f(x: int) -> float:
        if x == 5:
            os._exit(code)
        return x

    check_only_row_5_is_lost(scorer(f, timeout_s=30.0).score(rows(24)), f"reward f: the worker died (exit code {code})")


def test_a_call_that_crashes_python_costs_its_row(scorer: Callable[..., Scorer]) -> None:
    def f(x: int) -> float:
        return float(len(ctypes.string_at(0))) if x == 5 else x

    check_only_row_5_is_lost(
        scorer(f, timeout_s=30.0).score(rows(24)), "the worker died (signal 11, Segmentation fault)"
    )


def test_sys_exit_is_an_error_like_another(scorer: Callable[..., Scorer]) -> None:
    def f(x: int) -> float:
        return sys.exit(1) if x == 5 else x

    check_only_row_5_is_lost(scorer(f, timeout_s=30.0).score(rows(24)), "reward f: SystemExit: 1")


def test_workers_lost_in_one_step_are_there_again_in_the_next(scorer: Callable[..., Scorer]) -> None:
    def f(x: int) -> float:
        return os._exit(1) if x < 2 else 1.0

    one = scorer(f, timeout_s=30.0)
    assert lost(one.score(rows(6))) == [0, 1]
    assert lost(one.score(rows(6))) == [0, 1]


# ---- async
def test_async_calls_wait_at_the_same_time(scorer: Callable[..., Scorer]) -> None:
    async def f(x: int) -> float:
        await asyncio.sleep(0.2)
        return x

    started = time.monotonic()
    assert scorer(f, timeout_s=30.0).score(rows(64))["reward"].tolist() == list(range(64))
    assert time.monotonic() - started < 64 * 0.2 / 4


def test_an_async_call_that_hangs_costs_its_row(scorer: Callable[..., Scorer]) -> None:
    async def f(x: int) -> float:
        if x == 5:
            await asyncio.Event().wait()
        return x

    out = scorer(f).score(rows(24))
    check_only_row_5_is_lost(out, "TimeoutError after 0.4 s")
    assert out.metrics["reward/retries"] == 0


def test_an_async_call_that_blocks_the_others_is_found_by_trying_again(scorer: Callable[..., Scorer]) -> None:
    async def f(x: int) -> float:
        if x == 5:
            threading.Event().wait()
        return x

    out = scorer(f).score(rows(24))
    check_only_row_5_is_lost(out, "TimeoutError after 0.4 s")
    assert out.metrics["reward/retries"] > 0


def test_an_async_call_that_ends_its_process_is_found_by_trying_again(scorer: Callable[..., Scorer]) -> None:
    async def f(x: int) -> float:
        await asyncio.sleep(0.05)
        if x == 5:
            os._exit(7)
        return x

    check_only_row_5_is_lost(scorer(f, timeout_s=30.0).score(rows(24)), "the worker died (exit code 7)")


def test_async_calls_of_all_steps_share_one_event_loop(scorer: Callable[..., Scorer]) -> None:
    seen: list[Any] = []

    async def f(x: int) -> float:
        seen.append(asyncio.get_running_loop())
        return float(seen[0] is seen[-1])

    one = scorer(f, timeout_s=30.0, workers=1)
    assert one.score(rows(4))["reward"].tolist() == [1, 1, 1, 1]
    assert one.score(rows(4))["reward"].tolist() == [1, 1, 1, 1]


# ---- what is sent to workers
def test_a_worker_imports_neither_torch_nor_numpy(scorer: Callable[..., Scorer]) -> None:
    def f(x: int) -> float:
        return len({"torch", "numpy", "ray"} & set(sys.modules))

    assert scorer(f, timeout_s=30.0).score(rows(4))["reward"].tolist() == [0, 0, 0, 0]


def test_scoring_needs_no_torch_in_the_driver() -> None:
    assert run_script("import hybridflow.workers.scoring; print('torch' in sys.modules)") == "False\n"


def test_functions_are_sent_to_a_worker_once(scorer: Callable[..., Scorer], tmp_path: Path) -> None:
    class Loaded:
        def __setstate__(self, state: object) -> None:
            with (tmp_path / "loads").open("a") as file:
                file.write("x")

    loaded = Loaded()
    loaded.state = 1  # type: ignore[attr-defined]  # without state, nothing is restored

    def f(x: int) -> float:
        return float(loaded is not None)

    one = scorer(f, timeout_s=30.0, workers=1)
    for _ in range(3):
        one.score(rows(40))
    assert (tmp_path / "loads").read_text() == "x"


def test_a_function_of_a_file_is_sent_by_value(scorer: Callable[..., Scorer], tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("LEVEL = 3\n\n\ndef f(x):\n    return _level() + x\n\n\ndef _level():\n    return LEVEL\n")
    one = scorer(resolve(f"{file}:f", "reward"), timeout_s=30.0)
    file.unlink()
    assert one.score(rows(3))["reward"].tolist() == [3, 4, 5]


def test_a_function_that_cannot_be_sent_is_refused_at_once(scorer: Callable[..., Scorer]) -> None:
    lock = threading.Lock()

    def f(x: int) -> float:
        with lock:
            return x

    with pytest.raises(ConfigError, match=r"reward f cannot be sent to a worker process: .*lock.*reward.workers=0"):
        scorer(f)


@pytest.fixture
def only_here(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module that workers cannot import."""
    module = types.ModuleType("only_here")
    exec("def f(x): return 1.0\n\nclass Value: pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_here", module)
    return module


def test_a_function_that_cannot_be_loaded_shows_the_workers_traceback(
    scorer: Callable[..., Scorer], only_here: types.ModuleType
) -> None:
    with pytest.raises(RewardError, match=r"cannot load f:\n[^$]*No module named 'only_here'"):
        scorer(only_here.f).score(rows(4))


def test_a_value_that_cannot_be_loaded_is_an_error_of_its_rows(
    scorer: Callable[..., Scorer], only_here: types.ModuleType
) -> None:
    def f(value: Any) -> float:
        return 1.0

    out = scorer(f, timeout_s=30.0).score(rows(9, value=[*range(8), only_here.Value()]))
    assert 8 in lost(out)
    assert 0 not in lost(out)
    assert "No module named 'only_here'" in out["drop_reason"][8]


def test_a_value_that_cannot_be_sent_names_its_column(scorer: Callable[..., Scorer]) -> None:
    def f(value: Any) -> float:
        return 1.0

    with pytest.raises(BatchError, match=r"\['value'\] cannot be sent to a reward worker: .*lock"):
        scorer(f).score(rows(1, value=[threading.Lock()]))


# ---- processes begin and end
HEAD = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"


def run_script(code: str, *, as_file: Path | None = None) -> str:
    """What a script prints that has no guard for __main__; from a file, or as a notebook's cell without one."""
    command = [sys.executable, "-"]
    if as_file:
        as_file.write_text(HEAD + code)
        command = [sys.executable, str(as_file)]
    return subprocess.run(command, input=HEAD + code, capture_output=True, text=True, check=True, timeout=60).stdout


SCRIPT = """
print("started")
import os
import numpy as np
from hybridflow.batch import Batch
from hybridflow.workers.scoring import RewardConfig, Scorer

class Answer:
    value = 2

def half(x):
    return x.value / 2

scorer = Scorer([("half", half, 1.0)], RewardConfig(workers=2))
print(scorer.score(Batch({"x": [Answer(), Answer()]}))["reward"].tolist())
"""
SCRIPT_PRINTS = "started\n[1.0, 1.0]\n"  # two lines, once


def test_a_script_without_guard_runs_once(tmp_path: Path) -> None:
    assert run_script(SCRIPT, as_file=tmp_path / "script.py") == SCRIPT_PRINTS


def test_functions_and_values_of_a_notebook_can_be_scored() -> None:
    assert run_script(SCRIPT) == SCRIPT_PRINTS


def test_close_ends_all_processes_and_what_they_started(scorer: Callable[..., Scorer]) -> None:
    def f(x: int) -> float:
        return float(subprocess.Popen(["sleep", "1000"]).pid)

    before = children()
    one = scorer(f, timeout_s=30.0)
    one.score(rows(4))
    assert len(children() - before) == 2 + 4
    one.close()
    assert not children() - before


def test_no_process_is_left_at_the_interpreters_end() -> None:
    pids = run_script(SCRIPT + 'import psutil; print(*(p.pid for p in psutil.Process().children()), sep=",")')
    workers = [int(pid) for pid in pids.splitlines()[-1].split(",")]
    assert len(workers) == 2
    assert_gone(workers)


BUSY = """
import threading
from pathlib import Path
import psutil

def busy(path):
    with open(path, "a") as file:
        file.write("x")
    return sum(range(10**13))

calls = Batch({"path": [sys.argv[1]] * 2})
threading.Thread(target=Scorer([("busy", busy, 1.0)], RewardConfig(workers=2)).score, args=(calls,)).start()
while Path(sys.argv[1]).read_text() != "xx":
    pass
print(*(process.pid for process in psutil.Process().children()), sep=",", flush=True)
"""


@pytest.mark.chaos
def test_no_process_survives_the_drivers_kill_whether_idle_or_in_a_call(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.touch()
    driver = subprocess.Popen(
        [sys.executable, "-c", HEAD + SCRIPT + BUSY, str(marks)], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    lines = [driver.stdout.readline() for _ in range(3)]
    driver.kill()
    driver.wait()
    driver.stdout.close()
    workers = [int(pid) for pid in lines[-1].split(",")]
    assert len(workers) == 4
    assert_gone(workers)


def assert_gone(pids: list[int]) -> None:
    there = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(there, timeout=10)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def test_an_interrupted_score_leaves_nothing_for_the_next() -> None:
    def f(x: int) -> float:
        if x < 0:
            threading.Event().wait()
        return x

    pool = WorkerPool([RewardFunction("f", f, ("x",))], 2, 30.0)
    hanging = pool.run([Chunk(0, [(0, {"x": 7}), (1, {"x": -1})])])
    assert next(hanging).value == 7
    hanging.close()
    assert [(o.row, o.value) for o in pool.run([Chunk(0, [(3, {"x": 8})])])] == [(3, 8.0)]
    pool.close()


def test_scores_from_several_threads_do_not_mix(scorer: Callable[..., Scorer]) -> None:
    def f(x: int) -> float:
        return x

    one = scorer(f, timeout_s=30.0)
    found: dict[int, list[float]] = {}

    def work(k: int) -> None:
        found[k] = one.score(Batch({"x": np.arange(20) + k}))["reward"].tolist()

    threads = [threading.Thread(target=work, args=(100 * k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {100 * k: [float(100 * k + i) for i in range(20)] for k in range(4)}
