from __future__ import annotations

import pytest

from rllm.algorithms.dr_grpo import DrGRPO
from rllm.algorithms.grpo import GRPO
from rllm.algorithms.rloo import RLOO
from rllm.errors import ConfigError
from rllm.trainer.algorithm import make_algorithm, make_roles
from rllm.trainer.assemble import Assembled, assemble
from rllm.trainer.config import load_config
from rllm.trainer.roles import Role, warn_of_unknown
from rllm.types import Episode, Step, Trajectory

from .conftest import RunTrainer


def episode(index: int, **rewards: float) -> Episode:
    """A rollout with a trajectory of one token for each role."""
    return Episode(
        task_id="t",
        index=index,
        trajectories=[
            Trajectory(name=name, reward=reward, steps=[Step(prompt_ids=[1], response_ids=[2], logprobs=[-1.0])])
            for name, reward in rewards.items()
        ],
    )


EPISODES = [episode(0, solver=1.0, judge=1.0), episode(1, solver=0.0, judge=0.0), episode(2, solver=0.5, judge=0.5)]


def assembled(roles: dict[str, Role]) -> Assembled:
    return assemble(EPISODES, GRPO(normalize_std=False), step=0, temperature=1.0, roles=roles)


def advantages(found: Assembled, name: str) -> list[float | None]:
    return [credit.advantage for credit in found.credits if credit.trajectory_name == name]


def test_roles_that_are_not_named_are_alike() -> None:
    assert advantages(assembled({}), "solver") == advantages(assembled({}), "judge") == [0.5, -0.5, 0.0]


def test_a_role_may_weigh_less() -> None:
    found = assembled({"judge": Role(weight=0.5)})
    assert advantages(found, "judge") == [0.25, -0.25, 0.0]
    assert advantages(found, "solver") == [0.5, -0.5, 0.0]


def test_a_role_may_have_an_estimator_of_its_own() -> None:
    found = assembled({"judge": Role(estimator=RLOO(), weight=2.0)})
    assert advantages(found, "judge") == pytest.approx([1.5, -1.5, 0.0])  # 1 - 0.25, times 2
    assert advantages(found, "solver") == [0.5, -0.5, 0.0]


def test_a_frozen_role_is_not_learned_from() -> None:
    found = assembled({"judge": Role(trainable=False)})
    assert len(found.batch) == 2
    assert found.dropped == {"not_trainable": 3}


def test_before_there_are_trajectories_nobody_knows_their_names(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_unknown({"agent": Role()}, [Episode()])
    assert caplog.messages == []


def test_a_role_that_nobody_has_is_told_once(run_trainer: RunTrainer, caplog: pytest.LogCaptureFixture) -> None:
    run_trainer({"roles": {"agent": {"weight": 0.5}, "agnt": {"weight": 0.5}}})
    assert [message for message in caplog.messages if message.startswith("roles.")] == [
        "roles.agnt: no trajectory of the first step has this name, so its settings did nothing there; the names are agent"
    ]


def roles_of(*settings: str) -> dict[str, Role]:
    config = load_config(settings)
    return make_roles(config, make_algorithm(config))


def test_roles_are_settings() -> None:
    roles = roles_of("roles.judge.weight=0.5", "roles.judge.estimator.name=rloo", "roles.coach.trainable=false")
    assert roles == {"judge": Role(weight=0.5, estimator=RLOO()), "coach": Role(trainable=False)}
    assert roles_of("algorithm.name=ppo", "roles.judge.trainable=false") == {"judge": Role(trainable=False)}
    settings = ("roles.judge.estimator.name=grpo", "roles.judge.estimator.normalize_std=false")
    assert roles_of(*settings) == {"judge": Role(estimator=GRPO(normalize_std=False))}


def test_an_estimator_has_no_part_in_the_loss_and_needs_nothing_for_it() -> None:
    roles = roles_of("roles.judge.estimator.name=dr_grpo")
    assert roles["judge"].estimator == DrGRPO(aggregation="token-mean")


def test_a_role_need_not_be_compared_with_the_greedy_rollout_that_others_are_compared_with() -> None:
    roles = roles_of("algorithm.name=remax", "roles.judge.estimator.name=rloo")
    assert roles == {"judge": Role(estimator=RLOO())}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["roles.judge.wait=0.5"], "roles.judge.wait is not a setting; did you mean 'roles.judge.weight'"),
        (["roles.judge.weight=0"], "roles.judge.weight=0: input should be greater than 0"),
        (["roles.judge.estimator.name=grp0"], "roles.judge.estimator.name='grp0' is not known"),
        (["roles.judge.estimator.name=ppo"], "it needs a critic"),
        (
            ["roles.judge.estimator.name=remax"],
            "it needs a critic, a teacher, or rollouts that the run's algorithm does not make",
        ),
        (
            ["roles.judge.estimator.name=rloo", "roles.judge.estimator.kl_coef=0.1"],
            "roles.judge.estimator.kl_coef=0.1 would have no effect: an estimator only credits, and everything else is as the "
            "run's algorithm has it; set algorithm.kl_coef",
        ),
        (
            ["roles.judge.estimator.name=grpo", "roles.judge.estimator.level=step"],
            "roles.judge.estimator.level='step' would have no effect",
        ),
        (
            ["roles.judge.trainable=false", "roles.judge.weight=0.5"],
            "roles.judge.weight=0.5 would have no effect on what is not learned from",
        ),
        (
            ["roles.judge.trainable=false", "roles.judge.estimator.name=rloo"],
            "roles.judge.estimator={'name': 'rloo'} would have no effect on what is not learned from",
        ),
        (
            ["roles.judge.estimator.name=dapo", "roles.judge.estimator.overlong_buffer=3"],
            "roles.judge.estimator.overlong_buffer=3: ",
        ),
        (["algorithm.name=ppo", "roles.judge.weight=0.5"], "roles.judge.weight: PPO credits single tokens"),
    ],
)
def test_what_does_not_fit_is_refused(settings: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        roles_of(*settings)
    assert told in str(caught.value)
