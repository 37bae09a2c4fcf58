"""GRPO (DeepSeekMath, arXiv 2402.03300, eq. 3). No KL by default; algorithm.kl=loss|reward switches the reference on.

hybridflow grpo model=smollm2 data=gsm8k reward.functions=[math]
"""

from hybridflow import Actor, Batch, Reference, Reward, Run, Sampling, recipe


@recipe("algorithm=grpo", "run.dir=runs/grpo")
def grpo(run: Run) -> None:
    """Group-relative policy optimisation: several samples a prompt, each compared with its group's mean."""
    actor, ref, reward = run.groups(Actor, Reference, Reward)

    def rollout(prompts: Batch, sampling: Sampling) -> Batch:  # training and validation share it
        batch = actor.generate(prompts, sampling)
        return batch | reward.score(batch)

    for _ in run.steps(validate=rollout):  # commits between steps; resumes where it stopped
        batch = rollout(run.prompts(), run.sampling)
        batch |= actor.old_log_probs(batch) | ref.log_probs(batch)
        batch |= run.advantages(batch)
        run.record(batch, actor.update(batch))
