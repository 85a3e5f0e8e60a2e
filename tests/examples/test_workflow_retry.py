"""The proposer and the checker: their tokens, their rewards, and their training."""

import asyncio

import pytest

from rllm.algorithms.grpo import GRPO
from rllm.engine.agent_workflow_engine import AgentWorkflowEngine
from rllm.testing.scripted import ScriptedEngine, decode
from rllm.trainer.credit import assemble
from rllm.types import TerminationReason

AUCTION = {"question": "Bids: 4 9 2 7", "answer": "9"}


@pytest.fixture
def roll_out(example):
    """Return the episodes of one auction, each from the model's answers in order: proposal, verdict, proposal, verdict."""
    workflow = example("workflow_retry", "agent").ProposeAndCheck

    def run(*rollouts, **workflow_args):
        engine = AgentWorkflowEngine(
            workflow,
            workflow_args,
            ScriptedEngine([answer for answers in rollouts for answer in answers]),
            n_parallel_tasks=1,
        )
        return asyncio.run(engine.execute_tasks([AUCTION] * len(rollouts), task_ids=["auction"] * len(rollouts)))

    return run


@pytest.mark.parametrize(
    ("answers", "rewards", "is_correct", "reason"),
    [
        (["9", "yes"], [1.0, 1.0], True, TerminationReason.ENV_DONE),
        (["4", "yes"], [0.0, 0.0], False, TerminationReason.ENV_DONE),
        (["4", "no", "9", "yes"], [0.0, 1.0, 1.0, 1.0], True, TerminationReason.ENV_DONE),
        (["9", "no", "7", "yes"], [1.0, 0.0, 0.0, 0.0], False, TerminationReason.ENV_DONE),
        (["4", "no", "9", "no"], [0.0, 1.0, 1.0, 0.0], True, TerminationReason.MAX_TURNS_EXCEEDED),
    ],
)
def test_each_answer_is_a_trajectory_with_its_own_reward(roll_out, answers, rewards, is_correct, reason):
    [episode] = roll_out(answers)
    assert [trajectory.reward for trajectory in episode.trajectories] == rewards
    assert [trajectory.name for trajectory in episode.trajectories] == ["proposer", "checker"] * (len(answers) // 2)
    assert [decode(trajectory.steps[0].response_ids) for trajectory in episode.trajectories] == answers
    assert (episode.is_correct, episode.termination_reason) == (is_correct, reason)
    assert episode.metrics["num_tries"] == len(answers) / 2
    assert not episode.failed


def test_second_attempt_continues_the_tokens_of_the_first(roll_out):
    [episode] = roll_out(["4", "no", "9", "yes"])
    first, _, second, _ = [trajectory.steps[0] for trajectory in episode.trajectories]
    answer = first.prompt_ids + first.response_ids
    assert second.prompt_ids[: len(answer)] == answer
    assert "No. Try again." in decode(second.prompt_ids[len(answer) :])


def test_number_of_attempts_is_limited(roll_out):
    [episode] = roll_out(["4", "no"], max_tries=1)
    assert len(episode.trajectories) == 2
    assert not episode.is_correct


def test_roles_are_compared_among_themselves(roll_out):
    episodes = roll_out(["9", "yes"], ["4", "yes"], ["4", "no", "9", "yes"])
    assembled = assemble(episodes, GRPO(normalize_std=False), step=0, temperature=1.0)
    advantages = {(credit.trajectory_name, credit.trace_id): credit.advantage for credit in assembled.credits}
    proposals = [value for (name, _), value in advantages.items() if name == "proposer"]
    verdicts = [value for (name, _), value in advantages.items() if name == "checker"]
    assert proposals == [0.5, -0.5, -0.5, 0.5]  # of the rewards 1, 0, 0, 1
    assert verdicts == [0.25, -0.75, 0.25, 0.25]  # of the rewards 1, 0, 1, 1
    assert {credit.group_id for credit in assembled.credits} == {"auction/proposer", "auction/checker"}


@pytest.mark.examples
def test_program_trains_any_model(one_step):
    metrics = one_step("workflow_retry")
    assert metrics["rollout/num_failed"] == 0.0
    assert metrics["agent/num_tries"] == 2.0


@pytest.mark.examples
@pytest.mark.parametrize("seed", [0, 1])
def test_training_improves_both_roles(train, seed):
    """As the README states."""
    first, *_, last = train("workflow_retry", f"seed={seed}")
    assert first["eval/accuracy"] <= 0.5
    assert last["eval/accuracy"] >= 0.9


@pytest.mark.examples
def test_second_attempt_helps_without_training(example, capsys):
    """Accuracies printed by retries.py, of the model before its training."""
    retries, offline = example("workflow_retry", "retries"), example("workflow_retry", "offline")
    asyncio.run(retries.main(str(offline.policy())))
    accuracies = [int(line.split()[3].rstrip("%")) for line in capsys.readouterr().out.splitlines()]
    assert len(accuracies) == 3
    assert accuracies[2] > accuracies[0]
