"""A run that was killed and started again is the run that was never killed, to the last bit."""

from __future__ import annotations

import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hybridflow import Actor, Reward, Run, recipe
from hybridflow.errors import CheckpointError
from hybridflow.trainer.checkpoint import Checkpoints
from tests.crash import OVERRIDES
from tests.runs import ROWS, numbers, quick, share_of_digits, weights


@pytest.fixture(scope="module")
def uninterrupted(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    quick(tiny_model, folder, *OVERRIDES)
    return folder


def test_case_11_the_same_seed_repeats_bit_for_bit_and_another_does_not(
    tiny_model: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    quick(tiny_model, tmp_path / "same", *OVERRIDES)
    assert numbers(tmp_path / "same") == numbers(uninterrupted)
    assert weights(tmp_path / "same") == weights(uninterrupted)
    quick(tiny_model, tmp_path / "other", *OVERRIDES, "run.seed=1")
    assert weights(tmp_path / "other") != weights(uninterrupted)


@pytest.mark.parametrize("where", ["generate", "reward", "backward", "optimizer", "rename"])
def test_a_run_killed_anywhere_resumes_to_the_same_weights_and_metrics(
    tiny_model: Path, uninterrupted: Path, tmp_path: Path, where: str
) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "tests.crash", str(tiny_model), str(folder), where, "4"]
    killed = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent, timeout=240)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (tmp_path / f"died-in-{where}").exists()
    assert [path.name for path in (folder / "checkpoints").glob("step-*")] == ["step-000002"]
    quick(tiny_model, folder, *OVERRIDES)
    assert numbers(folder) == numbers(uninterrupted)
    assert weights(folder) == weights(uninterrupted)


def test_case_29_a_finished_run_says_so_and_goes_on_when_steps_are_raised(
    tiny_model: Path, uninterrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    quick(tiny_model, folder, *OVERRIDES, "run.steps=4")
    before = (folder / "metrics.jsonl").read_bytes()
    quick(tiny_model, folder, *OVERRIDES, "run.steps=4")
    assert "this run is finished: all 4 steps are done" in capsys.readouterr().out
    assert (folder / "metrics.jsonl").read_bytes() == before
    quick(tiny_model, folder, *OVERRIDES)
    assert "resuming after step 4 of 6" in capsys.readouterr().out
    assert numbers(folder) == numbers(uninterrupted)


def test_case_29_a_resume_at_an_epoch_boundary_trains_the_next_epoch(tiny_model: Path, tmp_path: Path) -> None:
    common = ("run.checkpoint_steps=5", "validation.every_steps=0")
    epochs = (*common, "run.steps=null", "run.epochs=2")
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    quick(tiny_model, whole, *epochs)
    quick(tiny_model, parted, *common, "run.steps=5")
    quick(tiny_model, parted, *epochs)
    assert len(numbers(whole)) == 10 and numbers(whole)[-1]["epoch"] == 2.0
    assert numbers(parted) == numbers(whole)


def test_another_setting_is_refused_with_a_list_of_the_keys(tiny_model: Path, tmp_path: Path) -> None:
    quick(tiny_model, tmp_path / "run", "run.steps=1")
    with pytest.raises(CheckpointError) as error:
        quick(tiny_model, tmp_path / "run", "run.steps=2", "training.lr=1e-4", "loss.clip_high=0.3")
    text = str(error.value)
    assert re.search(r"loss\.clip_high: 0\.2 there, 0\.3 here\n  training\.lr: 0\.003 there, 0\.0001 here", text)
    assert "run.resume=never" in text


def test_other_data_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    quick(tiny_model, tmp_path / "run", "run.steps=1")
    with pytest.raises(CheckpointError, match="the training data's content"):
        quick(tiny_model, tmp_path / "run", "run.steps=2", rows=[{"prompt": "1+1", "answer": "2"}])


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_can_be_used(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    quick(tiny_model, folder, "run.checkpoint_steps=1", "run.steps=3")
    victim = next(path for path in (folder / "checkpoints" / "step-000003").rglob("*.distcp"))
    victim.write_bytes(victim.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"checkpoint damaged: .*\.distcp has \d+ bytes, not \d+"):
        quick(tiny_model, folder, "run.checkpoint_steps=1", "run.steps=4")
    earlier = folder / "checkpoints" / "step-000002"
    quick(tiny_model, folder, "run.checkpoint_steps=1", "run.steps=4", f"run.resume={earlier}")
    assert [row["step"] for row in numbers(folder)] == [1, 2, 3, 4]
    assert {path.name for path in (folder / "checkpoints").glob("step-*")} == {
        "step-000003.1", "step-000003", "step-000004"
    }  # fmt: skip


def test_a_command_that_goes_back_can_be_repeated(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    words = ("run.checkpoint_steps=1", "run.checkpoints_kept=9", "run.steps=3", "validation.every_steps=0")
    quick(tiny_model, folder, *words)
    back = f"run.resume={folder / 'checkpoints' / 'step-000001'}"
    quick(tiny_model, folder, *words, back)
    assert "a checkpoint that step-000001 does not lead to is kept as" in capsys.readouterr().out
    quick(tiny_model, folder, *words, back)
    assert "this run is finished: all 3 steps are done" in capsys.readouterr().out


def test_a_run_can_branch_off_another_runs_checkpoint(tiny_model: Path, tmp_path: Path) -> None:
    words = ("run.checkpoint_steps=2", "validation.every_steps=0")
    quick(tiny_model, tmp_path / "a", *words)
    start = f"run.resume={tmp_path / 'a' / 'checkpoints' / 'step-000002'}"
    quick(tiny_model, tmp_path / "b", *words, start)
    assert numbers(tmp_path / "b") == numbers(tmp_path / "a")[2:]
    assert weights(tmp_path / "b") == weights(tmp_path / "a")
    before = (tmp_path / "b" / "metrics.jsonl").read_bytes()
    quick(tiny_model, tmp_path / "b", *words, start)
    assert (tmp_path / "b" / "metrics.jsonl").read_bytes() == before


def test_a_run_that_ended_without_its_export_exports_when_it_is_started_again(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    quick(tiny_model, folder, "run.steps=2")
    whole = weights(folder)
    (folder / "export" / "trained_steps.txt").write_text("1\n")  # as if it were of an earlier end
    (folder / "export" / "model.safetensors").unlink()
    quick(tiny_model, folder, "run.steps=2")
    assert weights(folder) == whole


def test_a_run_that_stopped_early_stays_stopped_and_says_why(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("run.steps=9", "validation.every_steps=1", "training.lr=1e-9", "validation.sampling.temperature=0")
    quick(tiny_model, tmp_path / "run", *words, "validation.patience=2", validation=ROWS[:4])
    again = quick(tiny_model, tmp_path / "run", *words, "validation.patience=2", validation=ROWS[:4])
    assert "this run has stopped: 2 validations without improvement" in capsys.readouterr().out
    assert again.step == 2
    assert quick(tiny_model, tmp_path / "run", *words, "validation.patience=4", validation=ROWS[:4]).step == 4


def test_what_a_run_without_a_checkpoint_left_is_kept_aside(tiny_model: Path, tmp_path: Path) -> None:
    quick(tiny_model, tmp_path / "run", "run.steps=1")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    quick(tiny_model, tmp_path / "run", "run.steps=1", "training.lr=1e-4")
    assert (tmp_path / "run.1" / "metrics.jsonl").read_bytes() == before


def test_an_edited_reward_file_is_another_setting(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def score(response: str) -> float:\n    return float(len(response))\n")
    quick(tiny_model, tmp_path / "run", "run.steps=1", reward=f"{file}:score")
    file.write_text("def score(response: str) -> float:\n    return -float(len(response))\n")
    with pytest.raises(CheckpointError, match=r"reward\.functions: .*mine_"):
        quick(tiny_model, tmp_path / "run", "run.steps=2", reward=f"{file}:score")


def test_a_driver_that_draws_from_global_generators_resumes_to_the_same_draws(tiny_model: Path, tmp_path: Path) -> None:
    @recipe("algorithm=grpo")
    def drawing(run: Run) -> None:
        actor, reward = run.groups(Actor, Reward)
        for _ in run.steps():
            batch = actor.generate(run.prompts(), run.sampling)
            batch |= reward.score(batch)
            batch |= actor.old_log_probs(batch)
            batch |= run.advantages(batch)
            drawn = {"random": random.random(), "numpy": np.random.rand(), "torch": torch.rand(1).item()}
            run.record(batch, actor.update(batch), drawn)

    quick(tiny_model, tmp_path / "whole", driver=drawing)
    quick(tiny_model, tmp_path / "parted", "run.steps=2", driver=drawing)
    np.random.rand(), random.random(), torch.rand(1)
    quick(tiny_model, tmp_path / "parted", driver=drawing)
    assert numbers(tmp_path / "parted") == numbers(tmp_path / "whole")


def test_kl_coefficient_schedule_and_best_metric_survive(tiny_model: Path, tmp_path: Path) -> None:
    words = ("algorithm.kl=reward", "algorithm.kl_target=0.05", "algorithm.kl_horizon=20", "run.checkpoint_steps=2")
    more = ("training.lr_schedule=cosine", "validation.every_steps=2", "run.steps=6", "reward.workers=1")
    quick(tiny_model, tmp_path / "whole", *words, *more, validation=ROWS[:6])

    def interrupted_after_step_4(checkpoints: Checkpoints) -> None:
        if checkpoints.steps()[-1] == 4:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "_retire", interrupted_after_step_4)
        with pytest.raises(KeyboardInterrupt):
            quick(tiny_model, tmp_path / "parted", *words, *more, validation=ROWS[:6])
    quick(tiny_model, tmp_path / "parted", *words, *more, validation=ROWS[:6])
    assert numbers(tmp_path / "parted") == numbers(tmp_path / "whole")
    assert len({row["kl/coef"] for row in numbers(tmp_path / "whole") if "kl/coef" in row}) == 6


def test_starting_over_keeps_the_earlier_run_aside(tiny_model: Path, tmp_path: Path) -> None:
    quick(tiny_model, tmp_path / "run", "run.steps=1")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    quick(tiny_model, tmp_path / "run", "run.steps=1", "run.resume=never", "training.lr=1e-4")
    assert (tmp_path / "run.1" / "metrics.jsonl").read_bytes() == before


def test_a_drivers_own_state_survives(tiny_model: Path, tmp_path: Path) -> None:
    seen: list[float] = []

    @recipe("algorithm=grpo")
    def averaging(run: Run) -> None:
        actor, reward = run.groups(Actor, Reward)
        average = run.stateful("average", {"reward": 0.0})
        for _ in run.steps():
            seen.append(average["reward"])
            batch = actor.generate(run.prompts(), run.sampling)
            batch |= reward.score(batch)
            batch |= actor.old_log_probs(batch)
            batch |= run.advantages(batch)
            average["reward"] += 1.0
            run.record(batch, actor.update(batch))

    quick(tiny_model, tmp_path / "run", "run.steps=2", driver=averaging, reward=share_of_digits)
    quick(tiny_model, tmp_path / "run", "run.steps=3", driver=averaging, reward=share_of_digits)
    assert seen == [0.0, 1.0, 2.0]
