"""Validation alone, with the rollout that training uses.

hybridflow evaluate model.path=runs/x/export data=gsm8k reward.functions=[math] \\
    validation.sampling.n=16 validation.pass_at=[1,16]
"""

import json

from hybridflow import Actor, Batch, Reward, Run, Sampling, recipe
from hybridflow.batch import Metrics


@recipe("run.dir=runs/evaluate", trains=False)
def evaluate(run: Run) -> None:
    """Sample the validation rows; print reward and pass@k, and keep them in the run folder's evaluation.json."""
    metrics = scores(run)
    for name, value in metrics.items():
        print(f"{name} {value:.4f}")
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "evaluation.json").write_text(json.dumps(dict(metrics), indent=1))


def scores(run: Run) -> Metrics:
    """The validation metrics of the model as it is."""
    actor, reward = run.groups(Actor, Reward)

    def rollout(prompts: Batch, sampling: Sampling) -> Batch:
        batch = actor.generate(prompts, sampling)
        return batch | reward.score(batch)

    return run.validate(rollout)
