"""Supervised fine-tuning on rows of prompt and response.

hybridflow sft model=smollm2 data.path=chats.jsonl training.lr=1e-5 data.rows_per_step=128
"""

from hybridflow import Actor, Run, recipe


@recipe("algorithm=sft", "run.dir=runs/sft")
def sft(run: Run) -> None:
    """Supervised fine-tuning: the log-likelihood of given responses."""
    actor = run.group(Actor)
    for _ in run.steps(validate=lambda rows, _: actor.evaluate(rows, "sft")):
        batch = run.examples()
        run.record(batch, actor.update(batch))
