"""AlgorithmConfig: what it refuses, and that Hydra's structured configs take it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from omegaconf import OmegaConf

from hybridflow.algorithms.config import AlgorithmConfig
from hybridflow.errors import ConfigError

pytestmark = pytest.mark.unit


def test_the_defaults_are_legal_and_compose() -> None:
    composed = OmegaConf.merge(OmegaConf.structured(AlgorithmConfig), {"kl": "reward", "kl_target": 6})
    assert OmegaConf.to_object(composed) == AlgorithmConfig(kl="reward", kl_target=6.0)


def test_composing_it_imports_no_torch() -> None:
    code = "import sys, hybridflow.algorithms.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"aggregation": "token_maen"}, r"algorithm\.aggregation=token_maen: .* Did you mean token_mean\?"),
        ({"kl": "rewards"}, r"algorithm\.kl=rewards: it is one of none, reward, loss\. Did you mean reward\?"),
        ({"kl_estimator": "k4"}, r"algorithm\.kl_estimator=k4: it is one of k1, k2, k3"),
        ({"old_policy": "recomputed"}, r"algorithm\.old_policy=recomputed: .* Did you mean recompute\?"),
        ({"epochs": 0}, r"algorithm\.epochs=0: it is at least 1"),
        ({"minibatches": 0}, r"algorithm\.minibatches=0: it is at least 1"),
        ({"kl_coef": -0.1}, r"algorithm\.kl_coef=-0\.1: it is at least 0"),
        ({"entropy_coef": -0.1}, r"algorithm\.entropy_coef=-0\.1: it is at least 0"),
        ({"kl_stop": 0.0}, r"algorithm\.kl_stop=0\.0: it is above 0, or null"),
        ({"kl_target": 6.0, "kl": "loss"}, r"algorithm\.kl=loss reads it nowhere: say algorithm\.kl=reward"),
        ({"kl": "reward", "old_policy": "current"}, r"say algorithm\.old_policy=recompute or rollout"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_with_the_remedy(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AlgorithmConfig(**values)
