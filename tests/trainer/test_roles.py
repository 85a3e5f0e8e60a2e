from __future__ import annotations

import pytest

from rllm.algorithms.grpo import GRPO
from rllm.config.schema import RoleConfig
from rllm.errors import ConfigError
from rllm.trainer.config import load_config
from rllm.trainer.credit import Assembled, assemble
from rllm.trainer.selection import warn_of_unknown_roles
from rllm.trainer.settings import check_roles, make_algorithm
from rllm.types import Episode, Step, Trajectory

from .conftest import RunTrainer


def episode(index: int, **rewards: float) -> Episode:
    """Return a rollout with a trajectory of one token for each role."""
    return Episode(
        task_id="t",
        index=index,
        trajectories=[
            Trajectory(name=name, reward=reward, steps=[Step(prompt_ids=[1], response_ids=[2], logprobs=[-1.0])])
            for name, reward in rewards.items()
        ],
    )


EPISODES = [
    episode(0, solver=1.0, judge=1.0),
    episode(1, solver=0.0, judge=0.0),
    episode(2, solver=0.5, judge=0.5),
]


def assembled(roles: dict[str, RoleConfig]) -> Assembled:
    return assemble(EPISODES, GRPO(normalize_std=False), step=0, temperature=1.0, roles=roles)


def advantages(found: Assembled, name: str) -> list[float | None]:
    return [credit.advantage for credit in found.credits if credit.trajectory_name == name]


def test_roles_are_equal_by_default() -> None:
    assert advantages(assembled({}), "solver") == advantages(assembled({}), "judge") == [0.5, -0.5, 0.0]


def test_role_may_have_a_smaller_weight() -> None:
    found = assembled({"judge": RoleConfig(weight=0.5)})
    assert advantages(found, "judge") == [0.25, -0.25, 0.0]
    assert advantages(found, "solver") == [0.5, -0.5, 0.0]


def test_frozen_role_is_not_trained() -> None:
    found = assembled({"judge": RoleConfig(trainable=False)})
    assert len(found.batch) == 2
    assert found.dropped == {"not_trainable": 3}


def test_unknown_roles_are_not_reported_without_trajectories(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_unknown_roles({"agent": RoleConfig()}, [Episode()])
    assert caplog.messages == []


def test_unknown_role_is_reported_once(run_trainer: RunTrainer, caplog: pytest.LogCaptureFixture) -> None:
    run_trainer({"roles": {"agent": {"weight": 0.5}, "agnt": {"weight": 0.5}}})
    [message] = [message for message in caplog.messages if message.startswith("roles.")]
    assert message.startswith("roles.agnt: ")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["roles.judge.wait=0.5"], "roles.judge.wait is not a setting"),
        (["roles.judge.weight=0"], "roles.judge.weight=0: "),
        (["roles.judge.trainable=false", "roles.judge.weight=0.5"], "roles.judge.weight=0.5 "),
        (["algorithm.name=ppo", "roles.judge.weight=0.5"], "roles.judge.weight: PPO"),
    ],
)
def test_invalid_settings_are_rejected(settings: list[str], named: str) -> None:
    def check() -> None:
        config = load_config(settings)
        check_roles(config, make_algorithm(config))

    with pytest.raises(ConfigError) as caught:
        check()
    assert str(caught.value).startswith(named)


def test_frozen_role_works_with_every_algorithm() -> None:
    config = load_config(["algorithm.name=ppo", "roles.judge.trainable=false"])
    check_roles(config, make_algorithm(config))
