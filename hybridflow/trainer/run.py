"""Run: what a driver asks of its run: groups, rows, steps, state. The step boundary is the only commit point."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, overload

from ..algorithms.config import AlgorithmConfig
from ..algorithms.objective import reads_old_logprobs
from ..algorithms.registry import Loss, resolve
from ..batch import Batch, Metrics
from ..controller.group import Runtime, WorkerGroup
from ..controller.trace import Trace
from ..controller.worker import Worker
from ..engines import Sampling
from ..errors import ConfigError
from ..workers.actor import Actor
from ..workers.reward_model import RewardModel
from ..workers.scoring import reward_functions
from ..workers.settings import Settings
from .advantages import Advantages
from .checkpoint import Checkpoints, move_aside
from .checks import check_warmup
from .completions import Completions
from .config import Config, check, resolved, to_yaml
from .console import Console, plan
from .export import export, exported_step
from .lock import FolderLock
from .placement import check_debugged, make_runtime, place_of
from .report import write_report
from .resume import DriverState, check_same_run, comparable, random_state
from .rows import Rows, RowsSettings, check_given
from .tracking import MetricsFile, Tracker
from .unread import unread_by_roles, unread_without_validation
from .validation import Validation

Rollout = Callable[[Batch, Sampling], Batch]


class HasState(Protocol):
    """What `Run.stateful` takes beside a plain dict."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> None: ...


T = TypeVar("T", bound="HasState | dict[str, Any]")
G = TypeVar("G", bound=Worker[Any])
A1 = TypeVar("A1", bound=Worker[Any])
A2 = TypeVar("A2", bound=Worker[Any])
A3 = TypeVar("A3", bound=Worker[Any])
A4 = TypeVar("A4", bound=Worker[Any])
A5 = TypeVar("A5", bound=Worker[Any])


class Run:
    """One training run. Single use: declare groups and state, then step; close it, or use it as a context manager.

    rows, validation_rows: data already in memory, in the place of data.path and data.validation_path. `step`: steps
    committed. `last_rows`: what the last step recorded. trains=False: it only validates, so that no optimizer is made,
    no training row read, and nothing resumed.
    """

    def __init__(
        self,
        config: Config,
        *,
        name: str = "run",
        rows: Sequence[Mapping[str, Any]] | None = None,
        validation_rows: Sequence[Mapping[str, Any]] | None = None,
        trains: bool = True,
    ) -> None:
        check(config)
        self.config = config
        self.name = name
        self.trains = trains
        self.folder = Path(config.run.dir)
        self.seed: int = config.run.seed
        self.algorithm: AlgorithmConfig = config.algorithm
        self.sampling = config.sampling.sampling()
        self.loss = Loss(config.loss.name, **config.loss.options)
        self.console = Console()
        self.trace = Trace(self.folder / "trace", on_call=self.console.waiting)
        self.step = 0
        self.last_rows: Batch | None = None
        self._checked = False
        self._validates = False
        self._done = False
        self._commit_seconds = 0.0
        self._loop_began = 0.0, 0  # when, and at which step, this process began to step
        self._lock = FolderLock()
        self._trackers: Sequence[Tracker] = ()
        self._given_rows = rows, validation_rows
        self._handles: dict[str, Worker[Any]] = {}
        self._stateful: dict[str, HasState | dict[str, Any]] = {}
        self._parts: list[Batch | Mapping[str, float]] = []
        self._stop_reason: str | None = None
        self._checkpoints = Checkpoints(self.folder / "checkpoints", config.run.checkpoints_kept)
        self._resumed_from = self._checkpoints.to_resume(config.run.resume) if trains else None
        self._saved = DriverState.read(self._resumed_from) if self._resumed_from else None
        self._advantages = self.stateful("kl", Advantages(config.algorithm, config.advantage))

    # ---- groups
    @overload
    def groups(self, a: type[A1], b: type[A2], /) -> tuple[A1, A2]: ...
    @overload
    def groups(self, a: type[A1], b: type[A2], c: type[A3], /) -> tuple[A1, A2, A3]: ...
    @overload
    def groups(self, a: type[A1], b: type[A2], c: type[A3], d: type[A4], /) -> tuple[A1, A2, A3, A4]: ...
    @overload
    def groups(
        self, a: type[A1], b: type[A2], c: type[A3], d: type[A4], e: type[A5], /
    ) -> tuple[A1, A2, A3, A4, A5]: ...
    def groups(self, *roles: type[Worker[Any]]) -> tuple[Worker[Any], ...]:
        """The groups of several roles, in the order asked for."""
        return tuple(self.group(role) for role in roles)

    def group(self, role: type[G], name: str | None = None, config: Any = None) -> G:
        """The worker group of a role, as the driver's typed handle.

        name: when a role is used twice. config: what a role of your own receives as `settings`.
        """
        name = name or role.role
        if name in self._handles:
            raise ConfigError(
                f"group '{name}' is declared twice: give the second a name, run.group({role.__name__}, 'other')."
            )
        settings = self.settings if config is None else config
        place = place_of(self.config, name, role, self._runtime.devices)
        handle = role(settings, name, group=self._runtime.group(name, role, settings, place))
        if self._saved is not None and name in self._saved.handles:
            handle.load_state_dict(self._saved.handles[name])
        self._handles[name] = handle
        return handle

    # ---- rows
    def prompts(self, n: int | None = None) -> Batch:
        """The next n prompts (data.rows_per_step), tokenised; the data is gone through again and again.

        group_id is the draw's number, unique in the run.
        """
        return self._rows.draw("prompts", n)

    def examples(self, n: int | None = None) -> Batch:
        """The next n rows of prompt and response, for supervised fine-tuning."""
        return self._rows.draw("examples", n)

    def pairs(self, n: int | None = None) -> Batch:
        """The next n preference pairs, two rows each, the chosen one first; group_id is the pair's."""
        return self._rows.draw("pairs", n)

    # ---- the loop
    def steps(self, validate: Rollout | None = None) -> Iterator[int]:
        """Checks and starts everything declared, then yields step numbers from where the run stopped.

        Between two steps, and only there, metrics are committed, checkpoints written, validation run, the end decided.
        """
        if not self.trains:
            raise ConfigError(f"{self.name} was started to validate only (trains=False): it takes no steps.")
        self._validates = validate is not None
        if not self._start(validate):
            return
        self._loop_began = time.perf_counter(), self.step
        while not self._done:
            began = time.perf_counter()
            self._parts = []
            yield self.step
            if not self._parts:
                raise ConfigError(f"step {self.step} recorded nothing: end each step with run.record(batch, metrics).")
            ended = time.perf_counter()
            self._commit(ended - began, validate)
            self._commit_seconds = time.perf_counter() - ended
        self._finish()

    def advantages(self, batch: Batch) -> Batch:
        """Columns of the estimator that `advantage=` names, after KL in the reward where algorithm.kl=reward."""
        return self._advantages(batch)

    def record(self, *parts: Batch | Mapping[str, float]) -> None:
        """What this step has to show: metrics that ride on batches, updates' metrics, your own numbers.

        The rows of the first batch go to the completions.
        """
        self._parts.extend(parts)

    def validate(self, fn: Rollout) -> Metrics:
        """`fn` on the validation rows with validation.sampling: means of reward, components and loss, pass@k."""
        self._check_roles()
        metrics = self._validation.run(fn)
        self.console.idle()
        return metrics

    def stateful(self, name: str, obj: T) -> T:
        """Registers a driver's own state: saved with each checkpoint, restored here on resume. It has
        state_dict/load_state_dict, or is a plain dict; it may hold batches."""
        if name in self._stateful:
            raise ConfigError(f"stateful '{name}' is registered twice.")
        if self._saved is not None and name in self._saved.stateful:
            if isinstance(obj, dict):
                obj.update(self._saved.stateful[name])
            else:
                obj.load_state_dict(self._saved.stateful[name])
        self._stateful[name] = obj
        return obj

    def stop(self, reason: str) -> None:
        """Ends the run once this step is committed."""
        self._stop_reason = reason

    def show(self, batch: Batch, rows: int = 2) -> None:
        """Print a table of a few decoded rows."""
        self.console.completions(batch, rows)

    def metrics(self) -> list[dict[str, float]]:
        """Metrics of the committed steps, as in metrics.jsonl; step 0 is a validation before training."""
        return MetricsFile(self.folder / "metrics.jsonl").rows()

    # ---- what the parts are made from
    @cached_property
    def settings(self) -> Settings:
        """What the built-in roles read."""
        config = self.config
        return Settings(
            model=config.model,
            training=config.training,
            rollout=config.rollout,
            algorithm=config.algorithm,
            sampling=self.sampling,
            reward=config.reward,
            reward_functions=reward_functions(config.reward),
            loss=self.loss,
            reads_old_logprobs=reads_old_logprobs(
                self.loss, config.algorithm, resolve(config.advantage.name, "advantage")
            ),
            reference_path=config.reference.path,
            critic_path=config.critic.path,
            critic_training=config.critic.training,
            clip_value=config.critic.clip_value,
            seed=self.seed,
            deterministic=config.run.deterministic,
            trains=self.trains,
            optimizer_steps=self.total_steps * self._optimizer_steps_a_step if self.trains else 0,
        )

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        from ..workers.models.loading import load_tokenizer  # brings torch: not for --cfg or a typo

        return load_tokenizer(self.config.model)

    @cached_property
    def total_steps(self) -> int:
        """run.steps, or what run.epochs over the data come to."""
        return self.config.run.steps or self._rows.steps_in(self.config.run.epochs)

    @cached_property
    def _runtime(self) -> Runtime:
        return make_runtime(self.config, self.trace, self.console.say)

    @cached_property
    def _rows(self) -> Rows:
        check_given(self.config, *self._given_rows)
        settings = RowsSettings(self.config, *self._given_rows, trains=self.trains)
        place = place_of(self.config, Rows.role, Rows, 0)
        rows = Rows(settings, Rows.role, group=self._runtime.group(Rows.role, Rows, settings, place))
        if self.trains:
            for notice in rows.info.notices:
                self.console.say(notice)
        return rows

    @cached_property
    def _validation(self) -> Validation:
        config = self.config.validation
        validation = Validation(config, self._validation_rows(), config.sampling.sampling())
        return self.stateful("validation", validation)

    def _validation_rows(self) -> Batch | None:
        missing = self._rows.no_validation
        if missing is None:
            for notice in self._rows.validation_described()[1]:
                self.console.say(notice)
            return self._rows.validation_rows()
        if self.config.validation.every_steps:
            unread_without_validation(self.config, missing)
            self.console.say(f"no validation: {missing}")
        return None

    @property
    def _optimizer_steps_a_step(self) -> int:
        return self.algorithm.epochs * self.algorithm.minibatches

    # ---- start, commit, finish
    def _check_roles(self) -> None:
        """Once, at the first step or validation, when the driver has declared what it uses."""
        if not self._checked:
            unread_by_roles(self.config, set(self._handles), self.name, trains=self.trains)
            check_debugged(self.config.run.debug, {name: h.layout.size for name, h in self._handles.items()})
            self._checked = True

    def _start(self, validate: Rollout | None) -> bool:
        """Whether anything is left to do; if so, everything declared is up and restored."""
        from ..device import seed_everything  # brings torch
        from ..workers.models.loading import model_path

        self._check_roles()
        check_warmup(self.config, self.total_steps)
        self._began = time.perf_counter()
        if self._saved is not None and self._resumed_from is not None:
            check_same_run(self._saved, comparable(self.config), self._rows.info.fingerprint, self._resumed_from)
        self._prepare_folder()
        if (found := model_path(self.config.model.path)) != self.config.model.path:
            self.console.say(f"model.path={self.config.model.path}: {found}")
        rows, n, kind = self.config.data.rows_per_step, self.sampling.n, self.config.data.kind
        self.console.say(plan(rows, n, self._optimizer_steps_a_step, kind, self.total_steps))
        seed_everything(self.seed)
        if self._saved is not None:
            self._resume(self._saved)
        (self.folder / "config.yaml").write_text(to_yaml(self.config))
        self._trackers = [self._tracker(name) for name in self.config.run.trackers]
        if self._done and (not self.config.run.export or exported_step(self.folder / "export") == self.step):
            return False
        for name, group in self._running():
            group.start()
            if self._resumed_from is not None:
                group.load(self._resumed_from / name)
        if self._saved is not None:
            self._saved.restore_random()
        elif validate is not None and self._validation.due(0, last=False):
            self._log({"step": 0.0, **self._validated(validate)})
        self.trace.commit(self.step)
        return True

    def _prepare_folder(self) -> None:
        """The run folder, for this process alone, without what belongs to another run: that is kept aside."""
        self._lock.take(self.folder)
        resumed = self._resumed_from
        own = resumed is not None and resumed.resolve().parent == self._checkpoints.folder.resolve()
        new = resumed is None or (not own and self._checkpoints.started_from() != resumed.resolve())
        if new and (self.folder / "metrics.jsonl").exists():
            self.console.say(f"what an earlier run left in {self.folder} is kept as {move_aside(self.folder)}")
            self._lock.take(self.folder)
        self._metrics = MetricsFile(self.folder / "metrics.jsonl")
        self._metrics.cut(self._saved.metrics_bytes if own and self._saved is not None else 0)
        self._completions = Completions(self.folder / "completions")

    def _resume(self, saved: DriverState) -> None:
        assert self._resumed_from is not None
        if self.config.run.resume == str(self._resumed_from):
            for path in self._checkpoints.go_back_to(self._resumed_from, saved.step):
                self.console.say(f"a checkpoint that {self._resumed_from.name} does not lead to is kept as {path}")
        self.step = saved.step
        self._completions.cut(saved.step)
        self._rows.load_state_dict(saved.cursor)
        self._began -= saved.seconds
        self.console.say(f"resuming after step {saved.step} of {self.total_steps}, from {self._resumed_from}")
        self._stop_reason = saved.stopped if self.config.run.resume == "auto" else None
        reason = self._why_stop()
        self._done = reason is not None or self.step >= self.total_steps
        if reason is not None:
            remedy = f"say run.resume={self._resumed_from}" if self._stop_reason else "raise that limit"
            self.console.say(f"this run has stopped: {reason}. To go on all the same {remedy}.")
        elif self._done:
            self.console.say(
                f"this run is finished: all {self.total_steps} steps are done. To go on longer raise run.steps or "
                "run.epochs; for a new run give another run.dir."
            )

    def _commit(self, seconds: float, validate: Rollout | None) -> None:
        self._runtime.settle()
        self.step += 1
        metrics = {"step": float(self.step), "epoch": self._rows.epoch, **self._recorded(), "time/step": seconds}
        metrics["time/last_commit"] = self._commit_seconds
        metrics |= self.trace.seconds_by_call()
        self.console.idle()
        since, first = self._loop_began
        left = (self.total_steps - self.step) * (time.perf_counter() - since) / (self.step - first)
        self.console.step(self.step, self.total_steps, metrics, left)
        best = False
        if validate is not None and self._validation.due(self.step, last=self._last_step()):
            validated = self._validated(validate)
            metrics |= validated
            best = validated["val/best"] > 0
        length = self._log(metrics)
        every = self.config.run.checkpoint_steps
        self._done = self._last_step()
        if self._done or best or (every and self.step % every == 0):
            self._checkpoint(length, best)
        self.trace.commit(self.step)

    def _last_step(self) -> bool:
        return self.step >= self.total_steps or self._why_stop() is not None

    def _why_stop(self) -> str | None:
        """Why the run ends before its steps are done: the driver's own reason, run.max_hours, validation.patience."""
        hours = self.config.run.max_hours
        if self._stop_reason is not None:
            return self._stop_reason
        if hours is not None and time.perf_counter() - self._began > hours * 3600:
            return f"run.max_hours={hours} are over"
        if self._validates and self._validation.out_of_patience:
            return f"{self.config.validation.patience} validations without improvement (validation.patience)"
        return None

    def _running(self) -> Iterator[tuple[str, WorkerGroup]]:
        """Name and group of each role that is not switched off."""
        return ((name, h.group) for name, h in self._handles.items() if h.group is not None and not h.off)

    def _recorded(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for part in self._parts:
            metrics |= part.metrics if isinstance(part, Batch) else dict(part)
        batches = [part for part in self._parts if isinstance(part, Batch)]
        for batch in batches[:1]:
            self.last_rows = batch
            self._completions.write(self.step, batch)
        return metrics

    def _validated(self, validate: Rollout) -> dict[str, float]:
        metrics = dict(self.validate(validate))
        best = self._validation.improved(metrics)
        self.console.validation(self.step, metrics, best)
        if self.last_rows is not None:
            self.console.completions(self.last_rows, self.config.run.completions_shown)
        return {**{f"val/{name}": value for name, value in metrics.items()}, "val/best": float(best)}

    def _log(self, metrics: Mapping[str, float]) -> int:
        length = self._metrics.append(metrics)
        for tracker in self._trackers:
            tracker.log(int(metrics["step"]), {name: value for name, value in metrics.items() if name != "step"})
        return length

    def _checkpoint(self, metrics_bytes: int, best: bool) -> None:
        state = self._driver_state(metrics_bytes)

        def write(folder: Path) -> None:
            state.write(folder)
            for name, group in self._running():
                group.save(folder / name)

        self.console.waiting(f"checkpoint of step {self.step}")
        self._checkpoints.save(self.step, write, best=best)
        self.console.idle()

    def _driver_state(self, metrics_bytes: int) -> DriverState:
        return DriverState(
            step=self.step,
            config=comparable(self.config),
            data=self._rows.info.fingerprint,
            cursor=self._rows.state_dict(),
            handles={name: handle.state_dict() for name, handle in self._handles.items()},
            stateful={n: dict(o) if isinstance(o, dict) else o.state_dict() for n, o in self._stateful.items()},
            metrics_bytes=metrics_bytes,
            seconds=time.perf_counter() - self._began,
            stopped=self._stop_reason,
            random=random_state(),
        )

    def _finish(self) -> None:
        shutil.rmtree(self.folder / "failure", ignore_errors=True)  # of a call before the run went on
        if self.step < self.total_steps:
            self.console.say(f"stopped after step {self.step}: {self._why_stop()}")
        kinds = (Actor, RewardModel)  # of several that a driver declares, the policy is what it trains
        models = [handle for kind in kinds for handle in self._handles.values() if isinstance(handle, kind)]
        if self.config.run.export and models:
            export(self.folder / "export", self.step, models[0].export)
            self.console.idle()
            self.console.say(f"model exported to {self.folder / 'export'}")
        report = write_report(self.folder, self.name, to_yaml(self.config), self._metrics.rows(), self.last_rows)
        self.console.say(f"report: {report}")

    def _tracker(self, spec: str) -> Tracker:
        tracker: Tracker = resolve(spec, "tracker")(self.folder, resolved(self.config), self.step + 1)
        return tracker

    # ---- end
    def close(self) -> None:
        """Ends the groups and trackers; what was committed is on disk already."""
        self.console.idle()
        trackers, self._trackers = self._trackers, ()
        with ExitStack() as ends:  # one that cannot be ended keeps no other from it
            ends.callback(self._lock.release)
            ends.callback(self.trace.close)
            for tracker in trackers:
                ends.callback(tracker.close)
            if "_runtime" in self.__dict__:
                ends.callback(self._runtime.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
