"""Conversion of the section `algorithm` of a configuration, from YAML or a command line, to an algorithm."""

from __future__ import annotations

from typing import Any

import pytest

from rllm.algorithms.base import Algorithm
from rllm.algorithms.from_config import algorithm_of, kind_of, name_of
from rllm.algorithms.grpo import GRPO, DrGRPO
from rllm.algorithms.reinforce import RLOO
from rllm.algorithms.sft import SFT
from rllm.config.schema import RolloutConfig, TrainConfig
from rllm.errors import ConfigError


def algorithm(section: dict[str, Any], **rollout: Any) -> Algorithm:
    return algorithm_of(TrainConfig(algorithm=section, rollout=RolloutConfig(**rollout)))


def test_grpo_is_the_default() -> None:
    assert name_of({"clip_low": 0.1}) == "grpo"
    assert kind_of({}) is GRPO
    assert algorithm({"clip_low": 0.1}) == GRPO(clip_low=0.1)


def test_settings_have_the_types_of_the_fields() -> None:
    section = {"name": "rloo", "kl_coef": "1e-3", "dual_clip": "3"}
    assert algorithm(section) == RLOO(kl_coef=0.001, dual_clip=3.0)
    assert section == {"name": "rloo", "kl_coef": "1e-3", "dual_clip": "3"}


def test_fixed_length_defaults_to_the_longest_response() -> None:
    assert algorithm({"name": "dr_grpo"}, max_tokens=64) == DrGRPO(fixed_length=64)
    assert algorithm({"name": "dr_grpo", "fixed_length": 8}, max_tokens=64) == DrGRPO(fixed_length=8)
    assert algorithm({"aggregation": "fixed-length"}, max_tokens=64).fixed_length == 64


def test_samples_of_older_weights_are_corrected_by_default() -> None:
    assert algorithm({}, max_staleness=1).correction == "truncate"
    assert algorithm({"correction": "none"}, max_staleness=1).correction == "none"
    assert algorithm({"name": "sft"}, max_staleness=1) == SFT()


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"name": "grop"}, "algorithm.name='grop'"),
        ({"name": "rllm.types:Episode"}, "algorithm.name='rllm.types:Episode'"),
        ({"name": "rllm.algorithms.losses:whitened"}, "algorithm.name='rllm.algorithms.losses:whitened'"),
        ({"clip_lo": 0.1}, "algorithm.clip_lo "),
        ({"clip_low": True}, "algorithm.clip_low=True: "),
        ({"clip_low": "much"}, "algorithm.clip_low='much': "),
    ],
)
def test_errors_name_the_setting(section: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as raised:
        algorithm(section)
    assert str(raised.value).startswith(named)
