"""Reward models: what they learn from pairs, what they export, and how they score rollouts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hybridflow import Actor, Batch, Reward, RewardModel, Run, configure, train
from hybridflow.errors import BatchError, ConfigError, ModelError, RewardError
from hybridflow.recipes import grpo, ppo, reward_model
from hybridflow.workers.models.tiny import save_tiny_model
from tests.models import character_tokenizer
from tests.runs import QUICK, ROWS, numbers, share_of_digits

pytestmark = pytest.mark.fsdp

TRAINING = (
    "run.steps=40", "data.rows_per_step=16", "training.lr=3e-3", "training.activation_checkpointing=false",
    "run.trackers=[]", "run.completions_shown=0",
)  # fmt: skip


def preferences(count: int, seed: int) -> list[dict[str, str]]:
    """The response with more digits was chosen."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        digits = sorted(draw.sample(range(7), 2))
        worse, better = ("".join(draw.sample("0123456789", n) + draw.sample("abcdefghij", 6 - n)) for n in digits)
        rows.append({"prompt": f"{draw.randrange(10)}+{draw.randrange(10)}", "chosen": better, "rejected": worse})
    return rows


@pytest.fixture(scope="module")
def trained(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a reward model that likes digits, and `model`, what it exported."""
    folder = tmp_path_factory.mktemp("reward_model")
    words = [*TRAINING, f"model.path={tiny_model}", "data.path=memory", f"run.dir={folder / 'run'}"]
    config = configure(*words, "validation.every_steps=20", recipe=reward_model)
    with Run(config, name="reward_model", rows=preferences(400, 0), validation_rows=preferences(60, 1)) as run:
        model = run.group(RewardModel)
        for _ in run.steps(validate=lambda pairs, _: model.evaluate(pairs, run.loss)):
            pairs = run.pairs()
            run.record(pairs, model.update(pairs))
        model.export(folder / "model")
    return folder


def driven(model: Path, folder: Path, *overrides: str, driver: Any = ppo, rows: Any = ROWS) -> Run:
    """A run to be driven by hand."""
    words = (*QUICK, f"run.dir={folder}", *overrides, f"model.path={model}", "data.path=memory")
    return Run(configure(*words, recipe=driver), name=driver.__name__, rows=rows)


# ---- learning
def test_training_raises_the_accuracy_on_pairs_and_lowers_the_validation_loss(trained: Path) -> None:
    rows = numbers(trained / "run")
    accuracies = [row["reward_model/accuracy"] for row in rows if "reward_model/accuracy" in row]
    losses = [row["val/loss"] for row in rows if "val/loss" in row]
    assert accuracies[0] == 0.5  # a new head scores 0
    assert np.mean(accuracies[-5:]) > 0.9
    assert losses[0] == pytest.approx(np.log(2), abs=1e-6) and losses[-1] < 0.4


def test_the_recipe_does_the_same(trained: Path, tiny_model: Path, tmp_path: Path) -> None:
    words = (*TRAINING, "run.steps=2", "validation.every_steps=20", f"run.dir={tmp_path / 'run'}")
    rows, held_out = preferences(400, 0), preferences(60, 1)
    train(reward_model, *words, model=tiny_model, data=rows, validation=held_out)
    assert numbers(tmp_path / "run")[0] == numbers(trained / "run")[0]
    first, same = (numbers(folder / "run")[1] for folder in (tmp_path, trained))
    assert {k: first[k] for k in first if k.startswith("reward_model/")} == {
        k: same[k] for k in same if k.startswith("reward_model/")
    }


def test_its_export_loads_in_transformers_with_equal_scores(trained: Path, tiny_model: Path, tmp_path: Path) -> None:
    rows, model_of_run = preferences(9, 2), f"reward.model={trained / 'model'}"
    with driven(tiny_model, tmp_path / "run", model_of_run, driver=reward_model, rows=rows) as run:
        model = run.group(RewardModel)
        pairs = run.pairs(9)
        scores = model.score(pairs).fetch("reward/model")["reward/model"]
    tokenizer = AutoTokenizer.from_pretrained(trained / "model")
    classifier = AutoModelForSequenceClassification.from_pretrained(trained / "model")
    chosen, responses = pairs.fetch("prompt", "response")["prompt"], pairs.fetch("response")["response"]
    chats = [
        [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
        for prompt, response in zip(chosen, responses, strict=True)
    ]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False).rstrip() for chat in chats]
    encoded = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.no_grad():
        found = classifier(**encoded).logits.squeeze(-1).numpy()
    np.testing.assert_allclose(scores, found, atol=1e-5)
    assert (scores[::2] > scores[1::2]).mean() > 0.8


def test_evaluation_is_of_whole_pairs(trained: Path, tiny_model: Path, tmp_path: Path) -> None:
    words = (f"reward.model={trained / 'model'}",)
    with driven(tiny_model, tmp_path / "run", *words, driver=reward_model, rows=preferences(6, 3)) as run:
        model = run.group(RewardModel)
        pairs = run.pairs(6)
        pairs |= Batch({"keep": np.arange(12) > 0}, pairs.ids)  # one row of the first pair is missing
        found = model.evaluate(pairs, "bradley_terry").fetch()
        scores = model.score(pairs.drop("keep")).fetch()["reward/model"]
    assert np.isnan(found["loss"][:2]).all() and np.isnan(found["accuracy"][:2]).all()
    gap = scores[2::2] - scores[3::2]
    np.testing.assert_allclose(found["loss"][2:], np.repeat(np.log1p(np.exp(-gap)), 2), atol=1e-5)
    assert found["accuracy"][2:].tolist() == np.repeat((gap > 0).astype(float), 2).tolist()


def test_a_margin_of_the_data_is_read(tiny_model: Path, tmp_path: Path) -> None:
    losses = []
    for margin in (0.0, 2.0):
        rows = [{**row, "margin": margin} for row in preferences(16, 0)]
        with driven(tiny_model, tmp_path / str(margin), "run.steps=1", driver=reward_model, rows=rows) as run:
            losses.append(run.group(RewardModel).update(run.pairs(8))["reward_model/loss"])
    assert losses == pytest.approx([np.log(2), np.log1p(np.exp(2.0))], abs=1e-5)


# ---- scoring rollouts
def test_rollouts_are_scored_by_the_tokens_that_were_sampled(trained: Path, tiny_model: Path, tmp_path: Path) -> None:
    words = ("reward.functions=[model]", f"reward.model={trained / 'model'}")
    with driven(tiny_model, tmp_path / "run", *words) as run:
        actor, model, reward = run.groups(Actor, RewardModel, Reward)
        batch = actor.generate(run.prompts(), run.sampling)
        keep = np.arange(len(batch)) != 1
        batch = batch.drop("keep") | Batch({"keep": keep}, batch.ids)
        scored = model.score(batch)
        rows = (batch | scored | reward.score(batch | scored)).fetch()
    assert np.isnan(rows["reward/model"][1]) and rows["reward"][1] == 0
    classifier = AutoModelForSequenceClassification.from_pretrained(trained / "model")
    for i in np.flatnonzero(keep):
        ids = torch.tensor([[*rows["prompt_ids"][i], *rows["response_ids"][i]]])
        with torch.no_grad():
            assert rows["reward"][i] == pytest.approx(classifier(ids).logits.item(), abs=1e-5)
    assert scored.metrics["reward_model/errors"] == 0
    assert scored.metrics["reward_model/score"] == pytest.approx(rows["reward/model"][keep].mean(), abs=1e-5)


def test_a_weight_is_the_components_and_functions_add_to_it(trained: Path, tiny_model: Path, tmp_path: Path) -> None:
    functions = "reward.functions=[model,tests.runs:share_of_digits]"
    words = (functions, "reward.weights=[0.5,2]", f"reward.model={trained / 'model'}")
    with driven(tiny_model, tmp_path / "run", *words) as run:
        actor, model, reward = run.groups(Actor, RewardModel, Reward)
        batch = actor.generate(run.prompts(), run.sampling)
        with pytest.raises(
            BatchError, match=r"names model, but the batch has no column 'reward/model'\. Score it first"
        ):
            reward.score(batch)
        batch |= model.score(batch)
        rows = (batch | reward.score(batch)).fetch()
    digits = np.array([share_of_digits(text) for text in rows["response"]])
    np.testing.assert_allclose(rows["reward"], 0.5 * rows["reward/model"] + 2 * digits, atol=1e-5)


MESSAGES = [{"role": "system", "content": "Sum."}, {"role": "user", "content": "1+2"}]


@pytest.mark.parametrize("prompt", ["1+2", MESSAGES], ids=["text", "messages"])
def test_another_tokenizer_reads_text_under_its_own_template(
    prompt: Any, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy's ids are other characters to the reward model: they are never fed to it."""
    policy = save_tiny_model(tmp_path / "policy", 0, hidden=64)
    words = ("reward.functions=[model]", f"reward.model={trained / 'model'}")
    with driven(policy, tmp_path / "run", *words, rows=[{"prompt": prompt, "answer": "3"}]) as run:
        actor, model = run.groups(Actor, RewardModel)
        batch = actor.generate(run.prompts(1), run.sampling)
        rows = (batch | model.score(batch)).fetch()
    tokenizer = AutoTokenizer.from_pretrained(trained / "model")
    classifier = AutoModelForSequenceClassification.from_pretrained(trained / "model")
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    for i in range(len(rows)):
        chat = [*asked, {"role": "assistant", "content": rows["response"][i]}]
        text = tokenizer.apply_chat_template(chat, tokenize=False).rstrip()
        with torch.no_grad():
            logits = classifier(tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids).logits
        assert rows["reward/model"][i] == pytest.approx(logits.item(), abs=1e-5)


def test_a_reward_model_also_learns_from_text_where_its_tokenizer_is_another(tiny_model: Path, tmp_path: Path) -> None:
    tokens = save_tiny_model(tmp_path / "tokens", 0, hidden=64)
    rows = preferences(16, 0)
    losses = []
    for policy, more in ((tiny_model, ()), (tokens, (f"reward.model={tiny_model}",))):
        with driven(policy, tmp_path / policy.name / "run", *more, driver=reward_model, rows=rows) as run:
            model = run.group(RewardModel)
            losses.append([model.update(run.pairs(8))["reward_model/loss"] for _ in range(3)])
    assert losses[0] == losses[1] and losses[0][0] != losses[0][2]


def test_case_10_a_score_that_is_not_a_number_drops_the_row_and_too_many_stop_the_run(
    trained: Path, tiny_model: Path, tmp_path: Path
) -> None:
    three = character_tokenizer().convert_tokens_to_ids("3")

    def poison(worker: Any) -> None:
        next(shard for shard in worker._train.parameters() if "embed_tokens" in shard.name).tensor[three] = torch.nan

    words = ("reward.functions=[model]", f"reward.model={trained / 'model'}", "reward.max_error_fraction=0.5")
    rows = [{"prompt": prompt, "answer": ""} for prompt in ("3+1", "1+1", "2+2", "4+4")]
    with driven(tiny_model, tmp_path / "run", *words, f"sampling.banned_tokens=[{three}]", rows=rows) as run:
        actor, model, reward = run.groups(Actor, RewardModel, Reward)
        batch = actor.generate(run.prompts(4), run.sampling)
        model.on_ranks(poison)
        scored = model.score(batch)
        batch |= scored
        found = (batch | reward.score(batch)).fetch()
        bad = np.array([prompt == "3+1" for prompt in found["prompt"]])
        assert bad.sum() == 4 and (found["keep"] == ~bad).all()
        assert set(found["drop_reason"][bad]) == {"reward model: the score is not a number"}
        assert scored.metrics["reward_model/errors"] == 4 and (found["reward"][bad] == 0).all()
        worse = actor.generate(run.prompts(4), run.sampling)
        object.__setattr__(model.on_ranks(lambda worker: worker)[0].settings.reward, "max_error_fraction", 0.1)
        with pytest.raises(
            RewardError, match=r"score of 4 of 16 rows is not a number; reward\.max_error_fraction=0\.1"
        ):
            model.score(worse)


def test_ppo_learns_from_a_reward_model(trained: Path, tiny_model: Path, tmp_path: Path) -> None:
    words = ("run.steps=25", "data.rows_per_step=8", "algorithm.kl=none", "critic.training.lr=1e-2", "run.export=false")
    model = ("reward.functions=[model]", f"reward.model={trained / 'model'}", "algorithm.minibatches=2")
    config = (*words, *model, f"run.dir={tmp_path / 'run'}")
    train(ppo, *QUICK, *config, model=tiny_model, data=ROWS)
    rewards = [row["reward/mean"] for row in numbers(tmp_path / "run")]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.5


# ---- what is refused
@pytest.mark.parametrize(
    ("driver", "words", "message"),
    [
        (ppo, ["reward.functions=[model]"], r"^reward\.functions names model, but reward\.model is not set"),
        (ppo, ["reward.functions=[exact]", "reward.model=x"], r"^reward\.model is set, but reward\.functions does not"),
        (
            grpo,
            ["reward.functions=[model]", "reward.model=x"],
            r"^reward\.model is set, but grpo has no reward_model\.$",
        ),
        (reward_model, ["reward.functions=[exact]"], r"^reward\.functions is set, but reward_model has no reward\.$"),
        (
            reward_model,
            ["sampling.n=4"],
            r"^sampling\.n is set, but reward_model samples nothing \(data\.kind=pairs\)\.$",
        ),
        (
            reward_model,
            ["algorithm.aggregation=token_mean"],
            r"^algorithm\.aggregation is set, but loss=bradley_terry is a",
        ),
        (
            reward_model,
            ["algorithm.entropy_coef=1"],
            r"^algorithm\.entropy_coef is set, but loss=bradley_terry is a mean",
        ),
        (reward_model, ["loss=sft"], r"^loss=sft is what a role actor learns by, and reward_model has none\.$"),
    ],
)
def test_what_does_not_fit_the_recipe_is_refused(
    driver: Any, words: list[str], message: str, tiny_model: Path, tmp_path: Path
) -> None:
    given = (*QUICK[:1], f"run.dir={tmp_path / 'run'}", "data.rows_per_step=4", *words)
    rows = preferences(8, 0) if driver is reward_model else ROWS
    with pytest.raises(ConfigError, match=message):
        train(driver, *given, model=tiny_model, data=rows)


def test_a_language_model_cannot_score(tiny_model: Path, tmp_path: Path) -> None:
    words = ("reward.functions=[model]", f"reward.model={tiny_model}", "reward.workers=0")
    with pytest.raises(ModelError, match=r"reward\.model=.*: Qwen2ForCausalLM has no score head\. Train one with"):
        train(ppo, "run.steps=1", f"run.dir={tmp_path / 'run'}", *words, model=tiny_model, data=ROWS)
