import random

import pytest
import torch

from rllm import utils
from rllm.compat.class_names import compute_pass_at_k
from rllm.errors import ConfigError
from rllm.evaluation.report import Estimate, mean_over_tasks, pass_at_k
from rllm.types import Trajectory


@pytest.mark.parametrize(
    ("num_rollouts", "num_correct", "k", "expected"),
    [
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),  # of the 6 pairs, 3 hold the correct one
        (4, 2, 2, 5 / 6),
        (4, 1, 4, 1.0),
        (4, 0, 4, 0.0),
        (4, 3, 2, 1.0),  # every pair has a correct one
        (1000, 1, 500, 1 / 2),
    ],
)
def test_pass_at_k_is_the_fraction_of_subsets_with_a_correct_answer(num_rollouts, num_correct, k, expected):
    assert pass_at_k(num_rollouts, num_correct, k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("k", [0, 5])
def test_pass_at_k_requires_at_least_k_rollouts(k):
    with pytest.raises(ConfigError, match=f"k={k}: .* needs 1 <= k <= 4"):
        pass_at_k(4, 1, k)


@pytest.mark.parametrize("num_correct", [-1, 5])
def test_more_correct_than_rollouts_is_rejected(num_correct):
    with pytest.raises(ConfigError, match=f"num_correct={num_correct}: of 4 rollouts 0 to 4 are correct"):
        pass_at_k(4, num_correct, 1)


def test_interval_of_single_trials_is_wilsons():
    """30 of 100: the interval of Wilson (1927) is [0.2189, 0.3958]."""
    estimate = mean_over_tasks([1.0] * 30 + [0.0] * 70, num_rollouts=100)
    assert estimate.value == pytest.approx(0.3)
    assert estimate.low == pytest.approx(0.2189, abs=1e-4)
    assert estimate.high == pytest.approx(0.3958, abs=1e-4)


def test_repeated_rollouts_do_not_narrow_the_interval():
    once = mean_over_tasks([1.0, 0.0] * 10, num_rollouts=20)
    assert mean_over_tasks([1.0, 0.0] * 10, num_rollouts=20 * 16) == once


def test_independent_rollouts_narrow_the_interval():
    few = mean_over_tasks([0.5] * 20, num_rollouts=20)
    many = mean_over_tasks([0.5] * 20, num_rollouts=20 * 16)
    assert many.high - many.low < (few.high - few.low) / 3.5


def test_few_tasks_widen_the_interval_by_students_t():
    """The standard error is 0.03536, and t of 4 degrees of freedom 2.776: as precise as 99.7 trials."""
    estimate = mean_over_tasks([0.4, 0.45, 0.5, 0.55, 0.6], num_rollouts=1000)
    assert (estimate.low, estimate.high) == (pytest.approx(0.404, abs=0.003), pytest.approx(0.596, abs=0.003))


def test_interval_is_never_empty_and_stays_within_the_unit():
    assert mean_over_tasks([1.0] * 3, num_rollouts=300) == Estimate(
        value=1.0, low=pytest.approx(0.4385, abs=1e-4), high=1.0, num_tasks=3
    )
    nothing = mean_over_tasks([0.0], num_rollouts=8)
    assert (nothing.low, nothing.high) == (0.0, pytest.approx(0.7935, abs=1e-4))
    assert str(mean_over_tasks([0.25], num_rollouts=4)) == "25.0% [1.5%, 88.2%]"


@pytest.mark.parametrize(("easy", "hard"), [(0.3, 0.3), (0.2, 1.8), (50.0, 50.0)])
@pytest.mark.parametrize("num_rollouts", [1, 8])
def test_intervals_cover_the_truth_in_19_of_20_samples_of_tasks(easy, hard, num_rollouts):
    """Tasks of any difficulty: most very easy or very hard, most hard, or all equal."""
    rng = random.Random(0)

    def covers() -> bool:
        chances = [rng.betavariate(easy, hard) for _ in range(30)]
        rates = [sum(rng.random() < chance for _ in range(num_rollouts)) / num_rollouts for chance in chances]
        estimate = mean_over_tasks(rates, 30 * num_rollouts)
        return estimate.low <= easy / (easy + hard) <= estimate.high

    assert 0.92 <= sum(covers() for _ in range(400)) / 400 <= 0.99


def trajectories(task, *rewards):
    return [Trajectory(task=task, reward=reward) for reward in rewards]


def test_trajectories_of_equal_tasks_are_grouped(capsys):
    results = [
        *trajectories({"question": "a", "n": 1}, 1.0, 0.0),
        *trajectories({"n": 1, "question": "a"}, 0.0, -1.0),
        *trajectories({"question": "b", "n": 1}, 0.0, 0.0, 0.0, None),
    ]
    found = utils.compute_pass_at_k(results)
    assert (found.pass_at_1, found.pass_at_k, found.k, found.num_tasks) == (1 / 8, 1 / 2, 4, 2)
    assert str(found) == "pass@1 12.5%, pass@4 50.0% (2 tasks, 8 rollouts, 1 of them without a reward)"
    assert capsys.readouterr().out == f"{found}\n"


def test_task_is_identified_by_its_id_if_it_has_one():
    results = [Trajectory(task={"id": 7, "seen_at": moment}, reward=0.5) for moment in (1, 2)]
    assert compute_pass_at_k(results).num_tasks == 1
    assert compute_pass_at_k(trajectories("What is 2 + 2?", 0.0)).num_tasks == 1


@pytest.mark.parametrize(
    ("results", "message"), [([], "no trajectories"), ([1.0], "takes trajectories, and this is float")]
)
def test_invalid_results_are_reported(results, message):
    with pytest.raises(ConfigError, match=message):
        compute_pass_at_k(results)


def test_saved_trajectories_can_be_loaded_by_torch(tmp_path, capsys):
    results = trajectories({"question": "a"}, 1.0, None)
    path = utils.save_trajectories(results, save_dir=tmp_path / "new", filename="a.pt")
    assert torch.load(path, weights_only=False) == results
    assert capsys.readouterr().out == f"saved 2 trajectories to {tmp_path / 'new' / 'a.pt'}\n"
