"""What a run says, refuses and survives, apart from resuming and learning."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter

from hybridflow import Actor, Batch, Reference, Reward, Run, Sampling, configure, recipe, train
from hybridflow.errors import BatchError, CheckpointError, ConfigError, EngineError, ModelError, RewardError
from hybridflow.recipes import evaluate, grpo, sft
from hybridflow.trainer.lock import FolderLock
from hybridflow.workers.rollout import transformers
from tests.runs import QUICK, ROWS, numbers, quick, share_of_digits

EXAMPLES = [{**row, "response": row["answer"]} for row in ROWS]
SFT = ("run.steps=3", "data.rows_per_step=4", "training.lr=3e-3", "run.trackers=[]")


# ---- what a run leaves behind
def test_the_run_folder_holds_configuration_metrics_completions_trace_report_and_model(
    tiny_model: Path, tmp_path: Path
) -> None:
    quick(tiny_model, tmp_path / "run", "run.trackers=[tensorboard]", validation=ROWS[:4])
    found = {path.name for path in (tmp_path / "run").iterdir()}
    assert found == {
        ".lock", "checkpoints", "completions", "config.yaml", "export", "metrics.jsonl", "report.html", "tensorboard",
        "trace",
    }  # fmt: skip
    rows = pq.read_table(tmp_path / "run" / "completions" / "step-000001.parquet").to_pylist()
    assert len(rows) == 16
    assert {"prompt", "response", "answer", "reward", "finish_reason", "prompt_ids", "step"} <= rows[0].keys()
    page = (tmp_path / "run" / "report.html").read_text()
    assert page.count("<svg") > 3 and "Samples of the last step" in page and "rows_per_step: 4" in page


def test_completions_and_report_show_text_as_text(tiny_model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "<b>1</b>", "answer": "[red]2"}]
    quick(tiny_model, tmp_path / "run", "run.steps=1", rows=rows)
    assert "&lt;b&gt;1&lt;/b&gt;" in (tmp_path / "run" / "report.html").read_text()


def test_the_trace_draws_the_recipes_dataflow(tiny_model: Path, tmp_path: Path) -> None:
    quick(tiny_model, tmp_path / "run", "run.steps=2")
    drawing = (tmp_path / "run" / "trace" / "dataflow.mmd").read_text()
    assert drawing.startswith("flowchart")
    assert all(f'"{call}"' in drawing for call in ("actor.sample", "reward.score", "actor.score_tokens", "actor.step"))
    events = json.loads((tmp_path / "run" / "trace" / "trace.json").read_text())["traceEvents"]
    assert {event["args"]["step"] for event in events if event["ph"] == "X"} >= {1, 2}


def test_the_plan_says_what_a_step_is(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quick(tiny_model, tmp_path / "run", "run.steps=1", "algorithm.minibatches=2")
    expected = "plan: 1 steps of 4 prompts x 4 samples = 16 rollouts, 2 optimizer steps of about 8 rollouts each"
    assert expected in capsys.readouterr().out


def test_the_time_in_calls_to_roles_is_measured_and_is_part_of_the_steps_time(tiny_model: Path, tmp_path: Path) -> None:
    run = quick(tiny_model, tmp_path / "run")
    for row in run.metrics():
        assert 0 < row["time/calls"] <= row["time/step"]


def test_each_token_carries_the_number_of_syncs_that_changed_something(tiny_model: Path, tmp_path: Path) -> None:
    seen: list[int] = []

    @recipe("algorithm=grpo", "algorithm.minibatches=2")
    def versions(run: Run) -> None:
        actor, reward = run.groups(Actor, Reward)
        for _ in run.steps():
            actor.generate(run.prompts(), run.sampling)
            batch = actor.generate(run.prompts(), run.sampling)
            seen.extend(set(batch.fetch("policy_version").ragged("policy_version").values.tolist()))
            batch |= reward.score(batch)
            batch |= actor.old_log_probs(batch)
            batch |= run.advantages(batch)
            run.record(batch, actor.update(batch))

    quick(tiny_model, tmp_path / "run", "run.steps=3", driver=versions)
    assert seen == [0, 1, 2]


# ---- what is refused, and how it is said
def test_an_rl_recipe_without_a_reward_is_an_error(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"grpo needs a reward: say reward\.functions="):
        train(grpo, *QUICK, f"run.dir={tmp_path / 'run'}", model=tiny_model, data=ROWS)


def test_keys_of_a_role_that_the_recipe_lacks_are_an_error(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward\.timeout_s is set, but sft has no reward"):
        train(sft, *SFT, "reward.timeout_s=3", f"run.dir={tmp_path / 'run'}", model=tiny_model, data=EXAMPLES)


def test_a_step_that_records_nothing_is_an_error(tiny_model: Path, tmp_path: Path) -> None:
    @recipe("algorithm=grpo")
    def forgetful(run: Run) -> None:
        run.groups(Actor, Reward)
        for _ in run.steps():
            pass

    with pytest.raises(ConfigError, match=r"step 0 recorded nothing: end each step with run\.record"):
        quick(tiny_model, tmp_path / "run", driver=forgetful)


def test_drawing_another_kind_of_row_than_the_data_has_is_an_error(tiny_model: Path, tmp_path: Path) -> None:
    config = configure(*QUICK, f"model.path={tiny_model}", "data.path=memory", f"run.dir={tmp_path / 'run'}")
    with pytest.raises(ConfigError, match=r"the driver draws examples, but data\.kind=prompts"):
        Run(config, rows=ROWS).examples()


def test_a_group_or_a_state_declared_twice_is_an_error(tiny_model: Path, tmp_path: Path) -> None:
    config = configure(*QUICK, f"model.path={tiny_model}", "data.path=memory", f"run.dir={tmp_path / 'run'}")
    run = Run(config, rows=ROWS)
    run.group(Actor)
    with pytest.raises(ConfigError, match="group 'actor' is declared twice"):
        run.group(Actor)
    run.stateful("mine", {})
    with pytest.raises(ConfigError, match="stateful 'mine' is registered twice"):
        run.stateful("mine", {})


def test_no_validation_rows_are_announced_and_validation_keys_then_refused(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick(tiny_model, tmp_path / "run", "run.steps=1")
    assert "no validation: rows in memory have no splits" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"validation\.every_steps is set, but there are no validation rows"):
        quick(tiny_model, tmp_path / "other", "validation.every_steps=5")


def test_values_are_read_by_fetching_them(tiny_model: Path, tmp_path: Path) -> None:
    config = configure(*QUICK, f"model.path={tiny_model}", "data.path=memory", f"run.dir={tmp_path / 'run'}")
    with Run(config, rows=ROWS) as run:
        batch = run.group(Actor).generate(run.prompts(2), Sampling(n=2, max_new_tokens=3))
        with pytest.raises(BatchError, match=r"column 'response' lives with the workers.*fetch\('response'\)"):
            batch["response"]
        assert len(batch.fetch("response")["response"]) == 4


def test_a_model_folder_that_is_none_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"model\.path=.*empty"):
        quick(tmp_path / "empty", tmp_path / "run")


def test_case_03_a_wrong_group_id_is_an_error(tiny_model: Path, tmp_path: Path) -> None:
    @recipe("algorithm=grpo")
    def mistaken(run: Run) -> None:
        actor, reward = run.groups(Actor, Reward)
        for _ in run.steps():
            batch = actor.generate(run.prompts(), run.sampling)
            batch |= reward.score(batch)
            batch = batch.drop("group_id").rename(group_id="rollout_id")
            batch |= Batch({"rollout_id": batch.fetch("group_id")["group_id"]}, batch.ids)
            run.record(batch, run.advantages(batch))

    with pytest.raises(BatchError, match="all 16 rows are groups of one: no baseline"):
        quick(tiny_model, tmp_path / "run", driver=mistaken)


def test_a_debugged_rank_that_there_is_not_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    words = ("run.runtime=ray", "placement.actor=2")
    for value, message in {
        "acter:0": r"^run\.debug=acter:0: the groups are actor, .*Did you mean actor\?",
        "actor:2": r"^run\.debug=actor:2: actor has ranks 0 to 1\.",
    }.items():
        with pytest.raises(ConfigError, match=message):
            quick(tiny_model, tmp_path / "run", *words, f"run.debug={value}")


def test_a_run_folder_in_use_by_another_process_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    other = FolderLock()
    other.take(folder)
    with pytest.raises(ConfigError, match=rf"is in use by process {os.getpid()}: wait for it"):
        quick(tiny_model, folder)
    other.release()
    assert quick(tiny_model, folder, "run.steps=1").step == 1


def test_a_run_folder_that_cannot_be_made_is_an_error(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.dir=.*file: .*; give a folder that can be written to"):
        quick(tiny_model, tmp_path / "file")


# ---- faults
def flaky(answer: str) -> float:
    """Fails for one answer in seven."""
    return 1.0 / (answer != "2")


def test_rows_whose_reward_fails_are_left_out_and_counted(tiny_model: Path, tmp_path: Path) -> None:
    run = quick(tiny_model, tmp_path / "run", "reward.max_error_fraction=1", "data.rows_per_step=20", reward=flaky)
    errors = [row["reward/errors"] for row in run.metrics()]
    assert errors == [12.0] * 4  # 3 of the 20 prompts have the answer 2, 4 samples each
    assert all(row["rows/kept_share"] == pytest.approx(68 / 80) for row in run.metrics())
    rows = pq.read_table(tmp_path / "run" / "completions" / "step-000001.parquet").to_pylist()
    assert sum("ZeroDivisionError" in (row["drop_reason"] or "") for row in rows) == 12


def test_too_many_failing_rewards_stop_the_run_with_the_first_traceback(tiny_model: Path, tmp_path: Path) -> None:
    def broken(response: str) -> float:
        raise ValueError("no such thing")

    with pytest.raises(RewardError, match=r"(?s)16 of 16.*no such thing") as error:
        quick(tiny_model, tmp_path / "run", reward=broken)
    assert error.value.where == "reward.score, rank 0"
    assert str(error.value).startswith("reward.score, rank 0: ")


@pytest.mark.parametrize("value", [math.nan, "1.0", (1.0,)])
def test_a_reward_that_is_no_number_is_an_error_of_its_row(tiny_model: Path, tmp_path: Path, value: object) -> None:
    def odd(answer: str) -> Any:
        return value if answer == "2" else 1.0

    run = quick(tiny_model, tmp_path / "run", "reward.max_error_fraction=1", "data.rows_per_step=20", reward=odd)
    assert run.metrics()[0]["reward/errors"] == 12.0


def test_a_full_disk_during_a_checkpoint_leaves_the_earlier_one_and_the_run_can_go_on(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = FileSystemWriter.write_data
    calls: list[int] = []

    def full_the_second_time(writer: FileSystemWriter, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(writer, *args)

    monkeypatch.setattr(FileSystemWriter, "write_data", full_the_second_time)
    with pytest.raises(CheckpointError, match=r"step 4 could not be written.*No space left.*step-000002, is untouched"):
        quick(tiny_model, tmp_path / "run", "run.checkpoint_steps=2", "run.steps=6")
    quick(tiny_model, tmp_path / "run", "run.checkpoint_steps=2", "run.steps=6")
    quick(tiny_model, tmp_path / "whole", "run.checkpoint_steps=2", "run.steps=6")
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")


def test_case_10_rollouts_that_all_met_a_nan_stop_the_run(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = transformers.draw

    def unsound(*args: Any) -> transformers.Drawn:
        drawn = draw(*args)
        return drawn._replace(sound=torch.zeros_like(drawn.sound))

    monkeypatch.setattr(transformers, "draw", unsound)
    with pytest.raises(EngineError, match="16 of 16 rollouts met a NaN"):
        quick(tiny_model, tmp_path / "run")


def test_case_17_the_end_of_the_data_loses_no_row(tiny_model: Path, tmp_path: Path) -> None:
    run = quick(tiny_model, tmp_path / "run", "run.steps=null", "data.rows_per_step=6", "sampling.n=2")
    prompts: list[str] = []
    for step in range(1, 5):
        table = pq.read_table(tmp_path / "run" / "completions" / f"step-{step:06d}.parquet")
        prompts += table["prompt"].to_pylist()[::2]
    assert run.step == 4 and set(prompts[:20]) == {row["prompt"] for row in ROWS}


# ---- the other recipes and options
def test_fine_tuning_lowers_the_loss(tiny_model: Path, tmp_path: Path) -> None:
    words = (*SFT, "run.steps=20", f"run.dir={tmp_path / 'run'}")
    run = train(sft, *words, model=tiny_model, data=EXAMPLES, validation=EXAMPLES[:5])
    losses = [row["val/loss"] for row in run.metrics() if "val/loss" in row]
    assert losses[-1] < losses[0] - 0.5


def test_reinforce_runs_as_a_preset_of_the_same_driver(tiny_model: Path, tmp_path: Path) -> None:
    run = quick(tiny_model, tmp_path / "run", "algorithm=reinforce")
    assert run.loss.name == "reinforce" and len(run.metrics()) == 4


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_a_kl_penalty_keeps_the_policy_at_the_reference(tiny_model: Path, tmp_path: Path, place: str) -> None:
    free = quick(tiny_model, tmp_path / "free", "algorithm.kl=loss", "algorithm.kl_coef=0", "run.steps=15")
    words = (f"algorithm.kl={place}", "algorithm.kl_coef=1.0", "run.steps=15")
    held = quick(tiny_model, tmp_path / "held", *words)
    far = free.metrics()[-1]["actor/kl_ref"]
    name = "actor/kl_ref" if place == "loss" else "kl/sequence"
    tokens = 1.0 if place == "loss" else held.metrics()[-1]["rollout/length_mean"]
    assert held.metrics()[-1][name] / tokens < far / 2


def test_early_stop_ends_the_run_and_keeps_the_best_checkpoint(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("run.steps=9", "validation.every_steps=1", "validation.patience=2", "training.lr=1e-9")
    greedy = ("validation.sampling.temperature=0", "validation.before_training=false", "run.checkpoints_kept=1")
    run = quick(tiny_model, tmp_path / "run", *words, *greedy, validation=ROWS[:4])
    assert run.step == 3
    assert "stopped after step 3: 2 validations without improvement" in capsys.readouterr().out
    assert [row["val/best"] for row in run.metrics()] == [1.0, 0.0, 0.0]
    kept = {path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")}
    assert kept == {"step-000001", "step-000003"}  # the best, and the last to go on from


def test_evaluation_prints_the_numbers_of_training_s_validation(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    words = (f"model.path={tiny_model}", f"data.path={rows}", f"data.validation_path={rows}")
    words += ("reward.functions=[tests.runs:share_of_digits]", "reward.workers=0")
    sampling = ("validation.sampling.max_new_tokens=4", "validation.sampling.temperature=1")
    words += (*sampling, "validation.sampling.n=2", "validation.pass_at=[1,2]")
    config = configure(*words, f"run.dir={tmp_path / 'evaluate'}", recipe=evaluate)
    with Run(config, name="evaluate", trains=False) as run:
        evaluate(run)
    printed = dict(line.split() for line in capsys.readouterr().out.splitlines())
    trained = train(grpo, *QUICK, "run.steps=1", *words, f"run.dir={tmp_path / 'run'}")
    before = {name: f"{value:.4f}" for name, value in trained.metrics()[0].items() if name.startswith("val/")}
    del before["val/best"]
    assert {f"val/{name}": value for name, value in printed.items()} == before
    assert {"reward", "pass@1", "pass@2", "errors"} <= printed.keys() and float(printed["reward"]) > 0


def test_a_second_group_of_a_role_has_a_name_of_its_own(tiny_model: Path, tmp_path: Path) -> None:
    config = configure(
        *QUICK, "algorithm.kl=loss", f"model.path={tiny_model}", "data.path=memory", f"run.dir={tmp_path}"
    )
    with Run(config, rows=ROWS) as run:
        first, second = run.group(Reference), run.group(Reference, "other")
        assert (first.name, second.name) == ("reference", "other")


def test_one_rank_can_be_looked_into(tiny_model: Path, tmp_path: Path) -> None:
    config = configure(*QUICK, f"model.path={tiny_model}", "data.path=memory", f"run.dir={tmp_path / 'run'}")
    with Run(config, rows=ROWS) as run:
        actor = run.group(Actor)
        assert actor.on_ranks(lambda worker: worker.name, ranks=[0]) == ["actor"]
        assert actor.layout.size == 1


def test_share_of_digits_is_what_it_says() -> None:
    assert share_of_digits("a1b2") == 0.5
