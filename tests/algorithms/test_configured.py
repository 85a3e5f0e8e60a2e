"""A section of a configuration, as YAML or a command line gives it, to an algorithm."""

from __future__ import annotations

from typing import Any

import pytest

from rllm.algorithms.configured import algorithm_from, kind_of, name_of
from rllm.algorithms.dr_grpo import DrGRPO
from rllm.algorithms.grpo import GRPO
from rllm.algorithms.rloo import RLOO
from rllm.algorithms.sft import SFT
from rllm.errors import ConfigError


def test_a_section_without_a_name_is_of_grpo() -> None:
    assert name_of({"clip_low": 0.1}) == "grpo"
    assert kind_of({}) is GRPO
    assert algorithm_from({"clip_low": 0.1}, max_tokens=None) == GRPO(clip_low=0.1)


def test_settings_have_the_types_of_the_fields() -> None:
    given = {"name": "rloo", "kl_coef": "1e-3", "dual_clip": "3"}
    assert algorithm_from(given, max_tokens=None) == RLOO(kl_coef=0.001, dual_clip=3.0)
    assert given == {"name": "rloo", "kl_coef": "1e-3", "dual_clip": "3"}


def test_losses_are_divided_by_the_longest_answer_unless_another_length_is_given() -> None:
    assert algorithm_from({"name": "dr_grpo"}, max_tokens=64) == DrGRPO(fixed_length=64)
    assert algorithm_from({"name": "dr_grpo", "fixed_length": 8}, max_tokens=64) == DrGRPO(fixed_length=8)
    assert algorithm_from({"aggregation": "fixed-length"}, max_tokens=64).fixed_length == 64


def test_what_older_weights_have_sampled_is_corrected_for_unless_it_is_not_to_be() -> None:
    assert algorithm_from({}, max_tokens=None, max_staleness=1).correction == "truncate"
    assert algorithm_from({"correction": "none"}, max_tokens=None, max_staleness=1).correction == "none"
    assert algorithm_from({"name": "sft"}, max_tokens=None, max_staleness=1) == SFT()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"name": "grop"}, "roles.a.estimator.name='grop' is not known: did you mean 'grpo'?"),
        (
            {"name": "rllm.types:Episode"},
            "roles.a.estimator.name='rllm.types:Episode' is no algorithm: name a subclass",
        ),
        (
            {"name": "rllm.algorithms.losses:whitened"},
            "roles.a.estimator.name='rllm.algorithms.losses:whitened' is no algorithm: name a subclass",
        ),
        (
            {"clip_lo": 0.1},
            "roles.a.estimator.clip_lo is not a setting of grpo; did you mean 'roles.a.estimator.clip_low'",
        ),
        ({"clip_low": True}, "roles.a.estimator.clip_low=True: booleans are not accepted here"),
        ({"clip_low": "much"}, "roles.a.estimator.clip_low='much': "),
    ],
)
def test_what_is_wrong_is_named_with_its_section(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        algorithm_from(given, max_tokens=None, section="roles.a.estimator")
    assert str(raised.value).startswith(told)
