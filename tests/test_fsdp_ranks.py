"""Two ranks do what one does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hybridflow.algorithms.config import AlgorithmConfig
from hybridflow.algorithms.objective import PolicyObjective
from hybridflow.algorithms.registry import Loss
from tests.fsdp_oracle import engine, gradients, random_batch

pytestmark = pytest.mark.fsdp

BATCH = random_batch(13)
ROWS_OF_RANK = (np.arange(4), np.arange(4, 13))
OBJECTIVE = PolicyObjective(Loss("ppo_clip"), AlgorithmConfig(entropy_coef=0.05), 32)


def work(rank: int, folder: Path, model: Path) -> None:
    """One rank: its gradients, metrics and log-probs into a file, then a checkpoint of both ranks after a step."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    trainer, rows = engine(model, tokens_per_microbatch=60), BATCH.take(ROWS_OF_RANK[rank])
    grads, metrics = gradients(trainer, rows, OBJECTIVE)
    offsets = {shard.name: shard.offset for shard in trainer.parameters()}
    logprobs = trainer.forward(rows, ["logprobs"])["logprobs"].values
    skipped = trainer.step(rows.take([]), OBJECTIVE)
    trainer.step(rows, OBJECTIVE)
    losses = trainer.evaluate(rows, OBJECTIVE)["loss"]
    trainer.save(folder / "checkpoint")
    trainer.export(folder / "export")
    found = {"grads": grads, "offsets": offsets, "metrics": metrics, "logprobs": logprobs, "skipped": skipped}
    torch.save({**found, "losses": losses}, folder / f"rank{rank}")
    dist.destroy_process_group()


def test_two_ranks_with_unequal_rows_and_micro_batches_do_what_one_does(tiny_model: Path, tmp_path: Path) -> None:
    mp.spawn(work, (tmp_path, tiny_model), nprocs=2)  # type: ignore[no-untyped-call]
    ranks = [torch.load(tmp_path / f"rank{rank}", weights_only=False) for rank in range(2)]
    one = engine(tiny_model, tokens_per_microbatch=60)
    grads, metrics = gradients(one, BATCH, OBJECTIVE)
    logprobs = one.forward(BATCH, ["logprobs"])["logprobs"].values
    np.testing.assert_allclose(np.concatenate([rank["logprobs"] for rank in ranks]), logprobs, atol=1e-5)
    for rank in ranks:
        assert rank["skipped"]["skipped"] == 1
        for name in ("loss", "grad_norm", "tokens", "entropy"):
            assert rank["metrics"][name] == pytest.approx(metrics[name], abs=1e-5)
        for name, part in rank["grads"].items():
            start = rank["offsets"][name][0]
            torch.testing.assert_close(part, grads[name][start : start + len(part)], atol=1e-5, rtol=0)

    one.load(tmp_path / "checkpoint")
    losses = np.concatenate([rank["losses"] for rank in ranks])
    np.testing.assert_allclose(one.evaluate(BATCH, OBJECTIVE)["loss"], losses, atol=1e-5)
    exported = engine(tmp_path / "export").evaluate(BATCH, OBJECTIVE)["loss"]
    np.testing.assert_array_equal(exported, one.evaluate(BATCH, OBJECTIVE)["loss"])
