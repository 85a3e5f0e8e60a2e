import math
import random
import statistics

import pytest

from rllm.evaluation.folder import difference_of_means, difference_of_rates


def test_interval_of_rates_matches_a_hand_computed_one() -> None:
    # Agresti & Min (2005): 100 pairs, 12 wins and 4 losses; half a pair more in each cell.
    pairs = [(0.0, 1.0)] * 12 + [(1.0, 0.0)] * 4 + [(1.0, 1.0)] * 84
    found = difference_of_rates(pairs)
    centre = (12 - 4) / 102
    half = 1.959964 * math.sqrt(((12 + 4 + 1) / 102 - centre**2) / 102)
    assert (found.value, found.first, found.second) == pytest.approx((0.08, 0.88, 0.96))
    assert (found.low, found.high) == pytest.approx((centre - half, centre + half), abs=1e-6)


def test_equal_results_still_have_an_interval() -> None:
    found = difference_of_rates([(1.0, 1.0)] * 10)
    assert found.value == 0
    assert found.low < 0 < found.high
    assert found.high == pytest.approx(-found.low)


def test_interval_of_means_matches_a_hand_computed_one() -> None:
    differences = [1.0, 2.0, 3.0] * 3 + [2.0]
    found = difference_of_means([(0.5, 0.5 + value) for value in differences])
    error = statistics.stdev(differences) / math.sqrt(10)
    assert found.value == 2.0
    assert (found.high - 2.0) / error == pytest.approx(2.262, abs=0.01)  # Student's t, 9 degrees of freedom


def test_intervals_of_rates_cover_the_true_difference() -> None:
    rng = random.Random(0)
    covered = []
    for _ in range(1000):
        draws = [(rng.random(), rng.random()) for _ in range(40)]
        found = difference_of_rates([(float(one < 0.4), float(two < 0.6)) for one, two in draws])
        covered.append(found.low <= 0.2 <= found.high)
    assert statistics.fmean(covered) == pytest.approx(0.95, abs=0.025)
