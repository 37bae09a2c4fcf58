"""A reward model from preferences: Bradley-Terry, with margins and centring (InstructGPT, arXiv 2203.02155, sec. 3.5).

hybridflow reward_model model.path=... data.path=pairs.jsonl data.rows_per_step=256 loss.centering=0.01

Rows have prompt, chosen, rejected and, if the data has it, margin.
"""

from hybridflow import RewardModel, Run, recipe


@recipe("algorithm=reward_model", "run.dir=runs/reward_model")
def reward_model(run: Run) -> None:
    """Reward-model training: of two responses the chosen one should score higher."""
    model = run.group(RewardModel)
    for _ in run.steps(validate=lambda pairs, _: model.evaluate(pairs, run.loss)):
        pairs = run.pairs()
        run.record(pairs, model.update(pairs))
