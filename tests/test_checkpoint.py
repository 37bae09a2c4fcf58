"""Checkpoints are whole or not there."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from hybridflow.errors import CheckpointError
from hybridflow.trainer.checkpoint import Checkpoints, verify

pytestmark = pytest.mark.unit


def write_some(folder: Path) -> None:
    (folder / "actor").mkdir()
    (folder / "actor" / "weights").write_bytes(b"weights" * 1000)
    (folder / "driver.pkl").write_bytes(b"state")


def disk_full(folder: Path) -> None:
    (folder / "driver.pkl").write_bytes(b"half of it")
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_checkpoint_appears_under_its_name_only_when_complete(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def write(folder: Path) -> None:
        write_some(folder)
        seen.append([path.name for path in tmp_path.glob("step-*")])

    saved = Checkpoints(tmp_path, kept=2).save(3, write)
    assert seen == [[]]
    assert saved == tmp_path / "step-000003"
    verify(saved)


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, kept=2)
    for step in range(1, 7):
        checkpoints.save(step, write_some, best=step == 2)
    assert checkpoints.steps() == [2, 5, 6]
    assert checkpoints.best() == 2
    assert checkpoints.latest() == tmp_path / "step-000006"


def test_case_30_the_only_checkpoint_stays_until_the_next_is_whole(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, kept=1)
    checkpoints.save(1, write_some)
    with pytest.raises(CheckpointError):
        checkpoints.save(2, disk_full)
    assert checkpoints.steps() == [1]
    verify(checkpoints.path(1))
    checkpoints.save(3, write_some)
    assert checkpoints.steps() == [3]


def test_a_full_disk_is_named_with_what_still_stands(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, kept=2)
    checkpoints.save(1, write_some)
    with pytest.raises(
        CheckpointError, match=r"step 2 could not be written.*No space left.*step-000001, is untouched; free"
    ):
        checkpoints.save(2, disk_full)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_a_full_disk_under_a_librarys_own_report_is_still_a_full_disk(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        try:
            disk_full(folder)
        except OSError as error:
            raise CheckpointError("the writer failed") from error

    with pytest.raises(CheckpointError, match=r"step 2 could not be.*No space left.*There is no earlier one; free"):
        Checkpoints(tmp_path, kept=2).save(2, write)
    assert not list(tmp_path.glob(".partial*"))


def test_the_checkpoint_just_written_is_never_retired(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, kept=1)
    checkpoints.save(100, write_some)
    checkpoints.go_back_to(checkpoints.save(50, write_some), 50)
    assert checkpoints.save(60, write_some).is_dir()
    assert checkpoints.steps() == [60]


def test_folders_of_other_names_are_no_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "step-000050.bak").mkdir()
    assert Checkpoints(tmp_path, kept=2).steps() == []


def test_what_a_killed_run_left_half_written_is_no_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, kept=2)
    checkpoints.save(1, write_some)
    (tmp_path / ".partial-000002").mkdir()
    assert checkpoints.steps() == [1]
    checkpoints.save(3, write_some)
    assert not list(tmp_path.glob(".partial*"))


@pytest.mark.parametrize("damage", ["missing", "shorter", "changed"])
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    saved = Checkpoints(tmp_path, kept=2).save(1, write_some)
    weights = saved / "actor" / "weights"
    content = weights.read_bytes()
    if damage == "missing":
        weights.unlink()
    else:
        weights.write_bytes(content[:-1] if damage == "shorter" else b"X" + content[1:])
    with pytest.raises(CheckpointError, match=r"damaged: .*actor/weights.*run\.resume=PATH"):
        verify(saved)


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        verify(tmp_path)
