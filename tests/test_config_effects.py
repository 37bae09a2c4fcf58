"""Case 31, keys that nobody reads: each is changed, and something that a user can see must change, or be refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from hybridflow import Run, configure
from hybridflow.errors import HybridFlowError
from hybridflow.recipes import grpo, ppo, reward_model
from hybridflow.trainer.compose import all_keys
from hybridflow.trainer.recipe import execute
from hybridflow.workers.rollout.transformers import TransformersRollout
from hybridflow.workers.training import policy
from tests.models import character_tokenizer, tiny_model_folder
from tests.runs import QUICK, numbers, weights

REWARDS = """
import re, sys, time

def digits(response: str):
    in_driver = "torch" in sys.modules
    return {"reward": len(re.findall(r"\\d", response)) / max(1, len(response)), "in_driver": in_driver}

def length(response: str) -> float:
    return len(response) / 10

def slow(response: str, answer: str) -> float:
    time.sleep(0.3 if answer == "slow" else 0.0)
    return float(len(response))

def fails_once_in_four(answer: str) -> float:
    return 1.0 / (answer != "0")

def as_shout(row: dict) -> dict:
    return {**row, "prompt": row["prompt"] + "!"}
"""
OWN_CODE = """
from transformers import Qwen2Config, Qwen2ForCausalLM

class OwnConfig(Qwen2Config):
    model_type = "own"

class OwnLM(Qwen2ForCausalLM):
    config_class = OwnConfig
"""
KL = ("algorithm.kl=loss", "algorithm.minibatches=2", "algorithm.kl_coef=0.5")
ADAPTIVE = ("algorithm.kl=reward", "algorithm.kl_target=0.01", "algorithm.kl_horizon=20", "run.steps=4")
MANY_STEPS = ("algorithm.minibatches=4", "algorithm.epochs=2", "training.lr=0.03")
ASKED = ("data.path={folder}/asked.jsonl", "data.validation_path={folder}/asked.jsonl")
VLLM = ("rollout=vllm", "model.path={folder}/wide", f"rollout.options.kv_cache_memory_bytes={64 << 20}")
LONG = ("data.path={folder}/long.jsonl",)
SCORED = ("reward.functions=[model]", "reward.model={folder}/scorer0")
VALUED = ("critic.training.lr=0.03", "critic.training.grad_clip=0")
INLINE = ("run.runtime=inline",)
SAMPLED = ("validation.sampling.temperature=1.0",)
RECOMPUTED: set[str] = set()
"""Names of layers that ran under activation checkpointing since it was last looked at."""
DECODED: list[int] = []
"""One entry a decoding step of the rollout engine."""
REFUSED, ERROR = "refused", "error"


@dataclass(frozen=True)
class Change:
    """One key set to another value over `base`; `sees` reads a run, None: its numbers, files, weights and console."""

    value: str
    base: tuple[str, ...] = ()
    sees: Callable[[Run], object] | str | None = None
    key: str | None = None  # what to write, where that is not the key itself
    driver: Callable[[Run], None] = grpo
    again: bool = False  # after a first run with `base` in the same folder


def deterministic(run: Run) -> bool:
    """Whether torch was told."""
    return torch.are_deterministic_algorithms_enabled()


CHANGES: dict[str, Change] = {
    "sampling.n": Change("2"),
    "sampling.temperature": Change("0.7"),
    "sampling.top_p": Change("0.9", sees=REFUSED),
    "sampling.top_k": Change("5", sees=REFUSED),
    "sampling.min_p": Change("0.1", sees=REFUSED),
    "sampling.max_new_tokens": Change("3"),
    "sampling.stop": Change("['1']"),
    "sampling.banned_tokens": Change("[5,6,7,8,9,10,11,12]"),
    "algorithm.epochs": Change("2"),
    "algorithm.minibatches": Change("2"),
    "algorithm.aggregation": Change("sequence_mean_token_mean"),
    "algorithm.entropy_coef": Change("0.1"),
    "algorithm.kl": Change("loss"),
    "algorithm.kl_coef": Change("0.1", base=KL),
    "algorithm.kl_estimator": Change("k2", base=KL),
    "algorithm.kl_target": Change("5.0", base=ADAPTIVE),
    "algorithm.kl_horizon": Change("40", base=ADAPTIVE),
    "algorithm.kl_stop": Change("1e-9", base=MANY_STEPS),
    "algorithm.old_policy": Change("current", sees=lambda run: "time/actor.score_tokens" in run.metrics()[-1]),
    "reward.functions": Change("[{folder}/rewards.py:length]"),
    "reward.weights": Change("[2.0]"),
    "reward.model": Change("{folder}/scorer1", base=SCORED, driver=ppo),
    "reward.workers": Change("1"),
    "reward.timeout_s": Change(
        "0.05",
        base=(
            "data.path={folder}/slow.jsonl",
            "reward.functions=[{folder}/rewards.py:slow]",
            "reward.workers=1",
            "reward.max_error_fraction=1",
        ),
    ),
    "reward.max_error_fraction": Change(
        "0.1",
        base=("reward.functions=[{folder}/rewards.py:fails_once_in_four]", "reward.max_error_fraction=0.9"),
        sees=REFUSED,
    ),
    "algorithm.critic_warmup_steps": Change("1", driver=ppo),
    "critic.path": Change("{folder}/other", driver=ppo),
    "critic.clip_value": Change("1e-4", base=VALUED, driver=ppo),
    "reference.path": Change("{folder}/other", base=KL),
    "validation.sampling.n": Change("2", base=SAMPLED),
    "validation.sampling.temperature": Change("0.5"),
    "validation.sampling.top_p": Change("0.2"),
    "validation.sampling.top_k": Change("2"),
    "validation.sampling.min_p": Change("0.9"),
    "validation.sampling.max_new_tokens": Change("3"),
    "validation.sampling.stop": Change("['1']"),
    "validation.sampling.banned_tokens": Change("[5,6,7,8,9,10,11,12]"),
    "validation.every_steps": Change("1"),
    "validation.before_training": Change("false"),
    "validation.pass_at": Change("[1,2]", base=("validation.sampling.n=2",)),
    "validation.metric": Change("accuracy", sees=REFUSED),
    "validation.patience": Change(
        "1", base=("run.steps=6", "validation.every_steps=1", "training.lr=1e-9", "validation.sampling.temperature=0")
    ),
    "run.dir": Change("{folder}/elsewhere", sees=lambda run: run.folder.name),
    "run.seed": Change("1"),
    "run.steps": Change("3"),
    "run.epochs": Change("2", base=("run.steps=null",)),
    "run.max_hours": Change("1e-9"),
    "run.resume": Change("never", sees=lambda run: run.folder.with_name("run.1").exists(), again=True),
    "run.checkpoint_steps": Change("1", base=("validation.every_steps=0",)),
    "run.checkpoints_kept": Change("1", base=("run.checkpoint_steps=1", "run.steps=4", "validation.every_steps=0")),
    "run.export": Change("false"),
    "run.trackers": Change("[tensorboard]"),
    "run.completions_shown": Change("2"),
    "run.deterministic": Change("true", sees=deterministic),
    "run.runtime": Change("ray", sees=lambda run: type(run._runtime).__name__),
    "run.call_timeout_s": Change("9", sees=REFUSED),  # inline; test_ray_faults.py has its effect
    "run.start_timeout_s": Change("9", sees=REFUSED),  # inline; test_ray_chaos.py has its effect
    "run.debug": Change("actor:0", sees=REFUSED),  # inline; test_ray_chaos.py has its effect
    "placement.actor": Change("2", base=INLINE, sees=REFUSED),  # test_ray_learning.py has the effect of these
    "placement.critic": Change("1", base=INLINE, sees=REFUSED, driver=ppo),
    "placement.reference": Change("1", base=(*INLINE, *KL), sees=REFUSED),
    "placement.reward_model": Change("1", base=(*INLINE, *SCORED), sees=REFUSED, driver=ppo),
    "model.path": Change("{folder}/other"),
    "model.tokenizer": Change("{folder}/reversed"),
    "model.chat_template": Change("{folder}/template.jinja"),
    "model.trust_remote_code": Change("true", base=("model.path={folder}/remote",), sees=ERROR),
    "model.attention": Change("flash", sees=REFUSED),
    "model.freeze": Change("['*embed*']"),
    "data.path": Change("{folder}/other.jsonl"),
    "data.task": Change("2", base=("data.path=reasoning_gym:chain_sum",), key="data.task.max_terms"),
    "data.kind": Change("examples", sees=REFUSED),
    "data.split": Change("more", base=("data.path={folder}/parts",)),
    "data.validation_path": Change("{folder}/other.jsonl"),
    "data.validation_split": Change("more", base=("data.validation_path={folder}/parts",)),
    "data.validation_rows": Change("2"),
    "data.prompt_key": Change("other", base=(*ASKED, "data.prompt_key=question")),
    "data.format": Change("{folder}/rewards.py:as_shout"),
    "data.system_prompt": Change("Sum."),
    "data.rows_per_step": Change("2"),
    "data.max_prompt_tokens": Change("40", base=LONG),
    "data.overlong_prompt": Change("error", base=(*LONG, "data.max_prompt_tokens=40"), sees=REFUSED),
    "data.shuffle": Change("false"),
    "training.lr": Change("1e-3"),
    "training.lr_schedule": Change("cosine"),
    "training.warmup_steps": Change("2", base=("training.lr_schedule=constant_with_warmup",)),
    "training.weight_decay": Change("0.5"),
    "training.adam_betas": Change("[0.5,0.6]"),
    "training.grad_clip": Change("1e-4"),
    "training.precision": Change("bf16"),
    "training.tokens_per_microbatch": Change("64"),
    "training.activation_checkpointing": Change("true", sees=lambda run: RECOMPUTED.pop() if RECOMPUTED else None),
    "training.shard_size": Change("2", sees=REFUSED),  # of the one rank there is
    "training.sequence_parallel": Change("2", sees=REFUSED),
    "rollout.max_context_tokens": Change("25", base=("data.max_prompt_tokens=24",)),
    "rollout.memory_fraction": Change("0.3", base=VLLM, sees=REFUSED),  # on a CPU
    "rollout.options": Change("4", base=VLLM, sees=REFUSED, key="rollout.options.max_num_sequences"),
    "rollout.max_concurrent": Change("2", sees=lambda run: (len(DECODED), DECODED.clear())),
    "advantage.normalize_std": Change("false"),
    "advantage.baseline": Change("none", base=("advantage=reinforce",)),
    "advantage.gamma": Change("0.9", driver=ppo),
    "advantage.lam": Change("0.9", driver=ppo),
    "advantage.whiten": Change("false", driver=ppo),
    "loss.clip_value": Change("0.1", sees=REFUSED),  # the critic's own: critic.clip_value
    "loss.centering": Change("0.5", driver=reward_model),
    "loss.clip_low": Change("1e-4", base=MANY_STEPS),
    "loss.clip_high": Change("1e-4", base=MANY_STEPS),
    "loss.dual_clip": Change("1.001", base=MANY_STEPS),
}
CHANGES |= {
    f"critic.{key}": replace(change, driver=ppo) for key, change in CHANGES.items() if key.startswith("training.")
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Everything that the table above names by a path."""
    folder = tmp_path_factory.mktemp("effects")
    (folder / "rewards.py").write_text(REWARDS)
    rows = [{"prompt": f"{i}+{j}", "answer": str(i + j)} for i in range(4) for j in range(3)]
    write_rows(folder / "rows.jsonl", rows)
    write_rows(folder / "other.jsonl", rows[::2])
    write_rows(folder / "slow.jsonl", [{**row, "answer": "slow"} if i % 3 else row for i, row in enumerate(rows)])
    write_rows(folder / "long.jsonl", [*rows, {**rows[0], "prompt": "1+" * 40 + "1"}])
    for split in ("train", "more", "test"):
        write_rows(folder / "parts" / f"{split}.jsonl", rows[: 6 if split == "more" else 12])
    write_rows(
        folder / "asked.jsonl", [{"question": row["prompt"], "other": "?", "answer": row["answer"]} for row in rows]
    )
    with_own_code(tiny_model_folder(folder / "remote"))
    tiny_model_folder(folder / "other", seed=1)
    tiny_model_folder(folder / "wide", heads=2, kv_heads=1)
    write_rows(folder / "pairs.jsonl", [{"prompt": "1", "chosen": str(i), "rejected": "a" * i} for i in range(12)])
    for seed in range(2):
        torch.manual_seed(seed)
        scorer = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1)
        scorer.save_pretrained(folder / f"scorer{seed}")
        character_tokenizer().save_pretrained(folder / f"scorer{seed}")
    (folder / "template.jinja").write_text("{% for message in messages %}{{ message.content }}={% endfor %}")
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}?{% endfor %}"
    tokenizer.save_pretrained(folder / "reversed")
    return folder


@pytest.fixture(autouse=True)
def _watch_recomputation(monkeypatch: pytest.MonkeyPatch) -> None:
    original = policy.checkpoint

    def watched(function: Callable[..., object], *args: object, **kwargs: object) -> object:
        RECOMPUTED.add("a layer")
        return original(function, *args, **kwargs)

    monkeypatch.setattr(policy, "checkpoint", watched)


@pytest.fixture(autouse=True)
def _count_decoding_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    original = TransformersRollout._step
    DECODED.clear()

    def counted(engine: TransformersRollout) -> None:
        DECODED.append(1)
        original(engine)

    monkeypatch.setattr(TransformersRollout, "_step", counted)


def with_own_code(model: Path) -> None:
    """Makes a model folder one that brings its own classes."""
    (model / "own.py").write_text(OWN_CODE)
    config = json.loads((model / "config.json").read_text())
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnLM"}
    (model / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": own}))


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def words(driver: object, folder: Path, model: Path, *overrides: str) -> list[str]:
    """A quick run on files, with validation in the middle and at the end, a checkpoint at the end alone."""
    pairs = driver is reward_model
    rows = folder / ("pairs.jsonl" if pairs else "rows.jsonl")
    base = [
        *(word for word in QUICK if not (pairs and word.startswith(("sampling.", "reward.")))),
        "run.steps=2",
        "run.checkpoint_steps=0",
        f"model.path={model}",
        f"data.path={rows}",
        f"data.validation_path={rows}",
        *([] if pairs else [f"reward.functions=[{folder}/rewards.py:digits]"]),
        "validation.every_steps=2",
    ]
    return [*base, *(word.replace("{folder}", str(folder)) for word in overrides)]


@dataclass(frozen=True)
class Observed:
    """All that a user sees of a run."""

    numbers: object
    files: object
    console: str
    weights: object
    error: str | None
    own: object


def look(
    change: Change,
    overrides: tuple[str, ...],
    folder: Path,
    run_dir: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
) -> Observed:
    """One run with these overrides."""
    error, own, where = None, None, run_dir
    capsys.readouterr()
    try:
        said = words(change.driver, folder, model, f"run.dir={run_dir}", *overrides)
        config = configure(*said, recipe=change.driver)
        where = Path(config.run.dir)
        run = execute(change.driver, config)
        own = change.sees(run) if callable(change.sees) else None
    except HybridFlowError as raised:
        error = str(raised)
    console = re.sub(r"\(\d.*?left\)|" + re.escape(str(where)), "", capsys.readouterr().out)
    if not (where / "metrics.jsonl").exists():
        return Observed(None, None, console, None, error, own)
    files = sorted(re.sub(r"events.*", "events", str(path.relative_to(where))) for path in where.rglob("*"))
    exported = weights(where) if (where / "export").exists() else None
    return Observed(numbers(where), files, console, exported, error, own)


def test_every_key_is_in_the_table() -> None:
    assert sorted(CHANGES) == sorted(all_keys())


@pytest.mark.parametrize(
    "key",
    ["sampling.n", "rollout.max_concurrent", "algorithm.kl_stop", "critic.path", "reward.model", "loss.centering"],
)
def test_two_equal_runs_look_equal(
    key: str, folder: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else any change would seem to have an effect."""
    change = CHANGES[key]
    first, second = (
        look(change, change.base, folder, tmp_path / name / "run", tiny_model, capsys) for name in ("a", "b")
    )
    assert first.error is None and first.numbers
    assert first == second


@pytest.fixture(scope="module")
def bases() -> dict[object, Observed]:
    """What runs without a change looked like, by their overrides: many keys share one."""
    return {}


@pytest.mark.parametrize("key", sorted(CHANGES))
def test_case_31_changing_a_key_has_an_effect_or_is_refused(
    key: str,
    bases: dict[object, Observed],
    folder: Path,
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change = CHANGES[key]
    seen = (change.driver, change.base, change.sees)
    if seen not in bases:
        bases[seen] = look(change, change.base, folder, tmp_path / "before" / "run", tiny_model, capsys)
    before = bases[seen]
    assert before.error is None or change.sees == ERROR
    run_dir = tmp_path / "after" / "run"
    if change.again:
        look(change, change.base, folder, run_dir, tiny_model, capsys)
    changed = (*change.base, f"{change.key or key}={change.value}")
    after = look(change, changed, folder, run_dir, tiny_model, capsys)
    torch.use_deterministic_algorithms(False)
    if change.sees == REFUSED:
        assert after.error is not None
        assert key in after.error or key.rpartition(".")[2] in after.error
    else:
        assert after.error is None
        assert after != before
