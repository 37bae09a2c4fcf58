"""A run that was killed and started again is the run that was never killed, to the last bit."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow.errors import CheckpointError
from tests.crash import OVERRIDES
from tests.runs import numbers, quick, share_of_digits, weights


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


def test_starting_over_keeps_the_earlier_run_aside(tiny_model: Path, tmp_path: Path) -> None:
    quick(tiny_model, tmp_path / "run", "run.steps=1")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    quick(tiny_model, tmp_path / "run", "run.steps=1", "run.resume=never", "training.lr=1e-4")
    assert (tmp_path / "run.1" / "metrics.jsonl").read_bytes() == before


def test_a_drivers_own_state_survives(tiny_model: Path, tmp_path: Path) -> None:
    from hybridflow import Actor, Reward, Run, recipe

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
