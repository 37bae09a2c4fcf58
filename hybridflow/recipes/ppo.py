"""PPO with a critic (Schulman et al. 2017, arXiv 1707.06347), as InstructGPT does it (arXiv 2203.02155).

hybridflow ppo model=smollm2 data=gsm8k reward.functions=[math] critic.training.lr=1e-5
hybridflow ppo model.path=... data.path=chats.jsonl reward.functions=[model] reward.model=runs/reward_model/export
"""

from hybridflow import Actor, Batch, Critic, Reference, Reward, RewardModel, Run, Sampling, recipe


@recipe("algorithm=ppo", "run.dir=runs/ppo")
def ppo(run: Run) -> None:
    """Proximal policy optimisation: a critic says how good each token was; rewards by functions or a reward model."""
    actor, critic, ref, reward, model = run.groups(Actor, Critic, Reference, Reward, RewardModel)

    def rollout(prompts: Batch, sampling: Sampling) -> Batch:  # training and validation share it
        batch = actor.generate(prompts, sampling)
        batch |= model.score(batch)  # no column where reward.functions does not name it
        return batch | reward.score(batch)

    for step in run.steps(validate=rollout):
        batch = rollout(run.prompts(), run.sampling)
        batch |= critic.values(batch) | actor.old_log_probs(batch) | ref.log_probs(batch)
        batch |= run.advantages(batch)  # reward - beta KL on each token, then GAE
        updates = [critic.update(batch)]
        if step >= run.algorithm.critic_warmup_steps:
            updates.append(actor.update(batch))
        run.record(batch, *updates)
