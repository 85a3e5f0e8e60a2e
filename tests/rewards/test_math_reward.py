import multiprocessing
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rllm.errors import RewardError
from rllm.rewards.math_reward import MAX_CHARS, RewardMathFn, _quickly_equal, are_equivalent
from rllm.rewards.reward_fn import math_reward_fn
from rllm.rewards.reward_types import RewardConfig, RewardInput
from rllm.types import Action


def reward_of(gold: Any, answer: str) -> float | None:
    return math_reward_fn({"ground_truth": gold}, rf"So it is \boxed{{{answer}}}.").reward


def test_examples_of_the_tutorial_have_their_rewards() -> None:
    task = {"ground_truth": "4"}
    assert math_reward_fn(task, "The answer is \\boxed{4}").reward == 1.0
    assert math_reward_fn(task, "After calculation, I get 4").reward == 0.0
    assert math_reward_fn(task, "\\boxed{5}").reward == 0.0
    assert math_reward_fn(task, Action("\\boxed{4}")).is_correct is True


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("4", "4.0"),
        (4, "4"),
        (4.0, "4"),
        (np.int64(4), "4"),
        (1e-07, "0.0000001"),
        (0.5, r"\frac12"),
        ("1/2", r"\dfrac{2}{4}"),
        (r"-\frac{1}{2}", "-0.5"),
        ("1,234,567", "1234567"),
        ("1{,}000", "1000"),
        (r"50\%", "50"),
        (r"90^\circ", "90"),
        (r"\$5", "5"),
        (r"\text{Evelyn}", "evelyn"),
        (r"90^\circ", "90°"),
        (r"\emptyset", r"\varnothing"),
        (r"\text{no}", "No."),
        ("1000000", "1 000 000"),
        ("1200", r"1\,200"),
        ("0.5", r"\frac 1 2"),
        ("6.02e23", r"6.02 \times 10^{23}"),
        ("1000", "1e3"),
        ("3.14", r"\approx 3.14"),
        ("0.002", r"2 \cdot 10^{-3}"),
        (r"6.63 \times 10^{-34}", "6.63e-34"),
        (r"\frac{1}{30000}", "0.00003333333"),
        (r"\left(3, \frac{\pi}{2}\right)", r"(3,\frac{\pi}{2})"),
        (r"The sum is \boxed{4}.", "4"),
        (["3", 4, "five"], "4"),
        (np.array(["3", "4"]), "4"),
    ],
)
def test_equal_texts_and_numbers_need_no_computer_algebra(gold: Any, answer: str) -> None:
    assert reward_of(gold, answer) == 1.0


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("x+1", "1+x"),
        (r"2\sqrt{2}", "2√2"),
        (r"4\sqrt{13}", "4√(13)"),
        (r"\sqrt{x+1}", "√{1+x}"),
        (r"-\infty", "-∞"),
        (r"(0,\infty)", "(0,∞)"),
        ("3:2", r"3\colon 2"),
        (r"\sqrt{8}", r"2\sqrt{2}"),
        ("(x+1)^2", "x^2+2x+1"),
        ("4", "x=4"),
        ("4", "2^2"),
        (r"\{1,2\}", r"\{2,1\}"),
        ("x>3", "3<x"),
        ("0.333333", r"\frac13"),
        (r"\frac{1}{30}", "0.033333"),
        ("0.3", "0.30000000000000004"),
        (r"12 \text{ cm}", "12"),
        ("7/2", "3 1/2"),
        ("-3.5", r"-3\,1/2"),
        ("1 2 3", "1, 2, 3"),
        (r"\log_2 100", r"\log_{2}100"),
        (r"\pi(R^2-r^2)", r"\pi R^2-\pi r^2"),
        (r"\{(1,2),(2,1)\}", "(1,2),(2,1)"),
        ("(3,4)", "x=3, y=4"),
        ("(3,4)", "y=4, x=3"),
        ("x=3, y=4", "(3,4)"),
        ("(3,4)", "3, 4"),
        ("3,4", "4, 3"),
        ("(3,4)", r"x=3 \text{ and } y=4"),
        ("x=3, y=4", "(x,y)=(3,4)"),
        ("x=3, y=4", "(y,x)=(4,3)"),
        ("x=3, x=4", "4, 3"),
        ("10", r"10 \text{ kg} \cdot \text{m}/\text{s}^{-2}"),
        ("18", "18 eggs"),
        ("18", r"\text{18 eggs}"),
        (r"\frac{1}{2}", "1/2 miles per hour"),
        ("90", "£90"),
        (r"\frac{1}{2}", "0.5€"),
        ("90", "¥90"),
        ("5m", "5 m"),
        ("3m+2s", "3 m + 2 s"),
        ("90", "90 km/h"),
        ("90", r"90~\text{km}"),
        (r"\sqrt{8}", r"2\sqrt{2}\,m/s^{2}"),
        ("6", "6 cm^2"),
        ("6 cm^{2}", "6"),
        ("6", "6 cm²"),
        ("6", "6 in"),
        ("6", r"6 kg \cdot m^2/s^2"),
        ("6 m^2", "6m^2"),
        ("2516_8", "2516"),
        (r"6 \text{ p.m.}", r"6 \text{ PM}"),
        (r"6 \text{ PM}", r"6 \text{ p.m.}"),
    ],
)
def test_mathematically_equal_answers_earn_1(gold: Any, answer: str) -> None:
    assert reward_of(gold, answer) == 1.0


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("4", "5"),
        ("4", "-4"),
        (r"2\sqrt{2}", "2√3"),
        ("3:2", r"2\colon 3"),
        ("0.33", r"\frac13"),
        (r"\frac{1}{23}", r"\frac{1}{24}"),
        ("x", "2"),
        ("(1,2)", "(2,1)"),
        ("(3,2)", "(5,4)"),
        ("even", "neve"),
        ("4", "1/0"),
        ("4", "import os"),
        ("4", r"\frac{"),
        (["3", "5"], "4"),
        ("12", "1 2"),
        ("12", r"1\,2"),
        ("12", r"1\quad 2"),
        ("12", r"1\%2"),
        ("123", "1 23"),
        ("31/2", "3 1/2"),
        ("2100", r"\log_2 100"),
        ("R-r", "0"),
        (r"\pi(R^2-r^2)", r"\pi(r^2-R^2)"),
        (r"\text{no}", "on"),
        ("(1,2)", r"\{1,2\}"),
        ("(3,4)", "4, 3"),
        ("(3,4)", "x=4, y=3"),
        ("x=3, y=4", "(4,3)"),
        ("x=3, y=4", "4, 3"),
        ("x=3, y=4", "(x,y)=(4,3)"),
        ("(3,4)", "(x,y,x)=(5,6)"),
        (r"x=3 \text{ and } y=4", "(4,3)"),
        (r"3 \text{ feet } 4 \text{ inches}", r"3 \text{ feet } 5 \text{ inches}"),
        (r"3 \text{ feet } 4 \text{ inches}", "3"),
        ("2", r"2 \text{ cm} + \sqrt{3}"),
        ("18", "18 thousand dollars"),
        ("18", "18 eggs and 3 hens"),
        ("18 dollars", "19 dollars"),
        ("90", "£91"),
        ("6", "7 cm^2"),
        ("6", "6 x^2"),
        ("6", "6 cm + 2"),
        ("3", "3 h 20 min"),
        ("2516_8", "2516_7"),
        (r"6:00 \text{ p.m.}", r"6:00 \text{ a.m.}"),
        ("1e3", "1000.5"),
        (r"6.63 \times 10^{-34}", r"1.6 \times 10^{-19}"),
        ("0.0000001", "0.0000002"),
        ("0.0000504", "0.0000501"),
        ("0.0000001", r"\frac{1}{5000000}"),
    ],
)
def test_different_answers_earn_0(gold: Any, answer: str) -> None:
    assert reward_of(gold, answer) == 0.0


@pytest.mark.parametrize(
    ("gold", "answer", "reward"),
    [
        ("100, 200", "200, 100", 1.0),
        (r"120^\circ, 240^\circ", r"240^\circ, 120^\circ", 1.0),
        (r"120^\circ,240^\circ", "240,120", 1.0),
        ("100, 105, 110", "110, 105, 100", 1.0),
        (r"\{100,200\}", "100,200", 1.0),
        (r"\{100,200\}", r"100 \text{ and } 200", 1.0),
        ("1000, 2000", r"1,000 \text{ and } 2,000", 1.0),
        ("1000, 2000", "2,000, 1,000", 1.0),
        ("1000, 2000", r"1{,}000, 2{,}000", 1.0),
        ("100,200", "200, 100", 1.0),
        ("100200", "100,200", 1.0),
        ("12345", r"12,\!345", 1.0),
        ("10,000", "10, 000", 1.0),
        ("(100,200)", "100,200", 1.0),
        ("x=100, y=200", "(100,200)", 1.0),
        ("100, 200", "100200", 0.0),
        ("12, 345", "12345", 0.0),
        ("12345", "12, 345", 0.0),
        ("12345", r"12\%345", 0.0),
        ("100, 200", "100, 300", 0.0),
        ("(100,200)", "200,100", 0.0),
        ("(100,200)", "100200", 0.0),
        (r"\{100,200\}", "(100,200)", 0.0),
        (r"120^\circ,240^\circ", "120240", 0.0),
    ],
)
def test_comma_is_part_of_a_number_or_a_separator(gold: str, answer: str, reward: float) -> None:
    assert reward_of(gold, answer) == reward


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "missing"),
        ("4", "missing"),
        (r"\boxed{4", "braces do not balance"),
        (r"\boxed{ }", "empty"),
        (r"<think>\boxed{4}</think> I do not know", "missing"),
    ],
)
def test_answer_without_a_box_is_wrong_with_the_reason(text: str, reason: str) -> None:
    verdict = math_reward_fn({"ground_truth": "4"}, text)
    assert (verdict.reward, verdict.is_correct) == (0.0, False)
    assert reason in verdict.metadata["reason"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "answer",
    [
        r"\{" + "," * 50_000,
        "1" + r"\quad" * 20_000 + "x",
        "1 " * 50_000,
        "1 eggs " * 20_000,
        "1 m" + " " * 50_000 + "x",
        "(1" + ",234" * 20_000,
        r"\frac" * 20_000,
        "x" + " " * 50_000 + "y",
    ],
)
def test_long_answers_are_parsed_in_linear_time(answer: str) -> None:
    assert reward_of("12", answer) == 0.0


def test_metadata_has_both_sides() -> None:
    assert math_reward_fn({"ground_truth": 4}, r"\boxed{5}").metadata == {"extracted": "5", "ground_truth": ["4"]}


@pytest.mark.parametrize(
    "task", [{}, {"ground_truth": None}, {"ground_truth": []}, {"ground_truth": ""}, {"answer": "4"}]
)
def test_task_without_ground_truth_is_an_error_instead_of_0(task: dict[str, Any]) -> None:
    with pytest.raises(RewardError, match=r"ground.truth"):
        math_reward_fn(task, r"\boxed{4}")


def test_malformed_number_is_a_text_ground_truth() -> None:
    assert math_reward_fn({"ground_truth": "1..2e5"}, r"\boxed{1..2e5}").reward == 1.0


def test_missing_dependency_is_reported_at_the_first_answer() -> None:
    hidden = "import sys; sys.modules['math_verify'] = None\n"
    program = r"from rllm.rewards.reward_fn import math_reward_fn; math_reward_fn({'ground_truth': '4'}, r'\boxed{4}')"
    done = subprocess.run([sys.executable, "-c", hidden + program], capture_output=True, text=True, check=False)
    assert "needs the package 'math-verify', which is not installed: pip install 'rllm[math]'" in done.stderr


def test_unmatchable_ground_truth_is_an_error() -> None:
    with pytest.raises(RewardError, match="'nan'"):
        math_reward_fn({"ground_truth": float("nan")}, r"\boxed{4}")


def test_config_sets_the_reward_of_each_outcome() -> None:
    judge = RewardMathFn(RewardConfig(correct_reward=2.0, incorrect_reward=-1.0, format_error_reward=-2.0))
    tasks = [RewardInput(task_info={"ground_truth": "4"}, action=text) for text in (r"\boxed{4}", r"\boxed{5}", "4")]
    assert [judge(task).reward for task in tasks] == [2.0, -1.0, -2.0]
    assert judge({"ground_truth": "4", "has_toolcall": True}, r"\boxed{4}").reward == 2.5


@pytest.mark.parametrize("answer", ["9^{9^{9^9}}", pytest.param("(99999)!!!", marks=pytest.mark.slow)])
def test_answer_that_takes_too_long_is_cancelled(answer: str) -> None:
    judge = RewardMathFn(RewardConfig(unk_error_reward=-0.5), deadline_s=0.2)
    verdict = judge({"ground_truth": "4"}, rf"\boxed{{{answer}}}")
    assert (verdict.reward, verdict.is_correct) == (-0.5, False)
    assert "not decided within 0.2 s" in verdict.metadata["reason"]


def test_overlong_answer_is_not_parsed() -> None:
    assert are_equivalent("4", "(" * MAX_CHARS + "4", deadline_s=60.0) is None


def test_many_threads_compare_concurrently() -> None:
    pairs = [("x+1", "1+x"), ("x+1", "x+2")] * 4
    with ThreadPoolExecutor(2) as threads:
        verdicts = list(threads.map(lambda pair: reward_of(*pair), pairs))
    assert verdicts == [1.0, 0.0] * 4


def test_comparison_does_not_change_the_alarm_of_this_process() -> None:
    before = signal.getsignal(signal.SIGALRM)
    assert are_equivalent("x+1", "1+x") is True
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_forked_process_has_its_own_workers() -> None:
    assert are_equivalent("x+1", "1+x") is True
    child = multiprocessing.get_context("fork").Process(target=_exit_with_verdict)
    child.start()
    child.join()
    assert child.exitcode == 7
    assert are_equivalent("x+1", "x+2") is False


def _exit_with_verdict() -> None:
    os._exit(7 if are_equivalent("x+1", "1+x") else 8)


def test_killed_worker_is_replaced() -> None:
    from rllm.rewards.math_reward import NUM_WORKERS, _workers

    assert are_equivalent("x+1", "1+x") is True
    workers = _workers(os.getpid())
    taken = [workers.get() for _ in range(NUM_WORKERS)]
    for worker in taken:
        if worker is not None:
            worker.end()
        workers.put(worker)
    assert are_equivalent("x+1", "1+x") is True


@given(st.text(alphabet=r"\{}0123456789./,-+%$^ frac", max_size=40))
def test_every_expression_equals_itself(answer: str) -> None:
    assert _quickly_equal(answer, answer) is True
    assert _quickly_equal("4", answer) in (True, False, None)


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        ("1/3", r"0.\overline{3}", True),
        (r"0.1\overline{6}", r"\frac{1}{6}", True),
        (r"-2.\bar{36}", r"-\frac{26}{11}", True),
        (r"0.\overline{36}", r"0.\overline{63}", False),
        (r"0.\overline{3}", "0.3", False),
        ("-2", r"\sqrt[3]{-8}", True),
        ("1", r"\sqrt[3]{2+\sqrt5}+\sqrt[3]{2-\sqrt5}", True),
        ("2", r"\sqrt[3]{-8}", False),
        (r"\frac{1}{2}", r"\sin 30^\circ", True),
        (r"\frac{3}{4}", r"\cos^2 (30^{\circ})", True),
        (r"\frac{1+\sqrt5}{4}", "\\cos 36°", True),
        (r"\frac{1}{2}", r"\cos 30^\circ", False),
        ("x^{10}+x^2", "x¹⁰+x²", True),
        ("10^{-3}", "10⁻³", True),
        ("x^2", "x³", False),
        ("12", "12 cm²", True),
        ("6", "2·3", True),
        ("2000", "2·10³", True),
        ("7/2", "3½", True),
        ("0.25", "¼", True),
    ],
)
def test_textbook_notation_is_accepted(gold: str, answer: str, equal: bool) -> None:
    assert reward_of(gold, answer) == float(equal)
    assert reward_of(answer, gold) == float(equal)


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        # Smaller than the precision of floats, and huge.
        ("1/2^{99}", "1/2^{98}", False),
        ("1/2^{99}", "2/2^{100}", True),
        ("1/2004!", "1/2006!", False),
        ("1/2004!", r"\frac{2005}{2005!}", True),
        (r"\frac{2^{2005}+1}{3*2^{2006}}", r"\frac{1}{3*2^{2006}}", False),
        (r"\frac{2^{2005}+1}{3*2^{2006}}", r"\frac{1}{6}", False),
        (r"\frac{2^{2005}}{3*2^{2006}}", r"\frac{1}{6}", True),
        (r"\frac{1}{10000000}", r"\frac{1}{10000001}", False),
        ("10^{-400}", r"2 \cdot 10^{-400}", False),
        ("2^{2^{10}}", "2^{1024}", True),
        ("(2^{10})^{10}", "2^{100}", True),
        ("100!", "100!+1", False),
        ("9^{9^{9}}", "9^{9^{8}}", False),
        ("e^{-1000}", "e^{-1001}", False),
        # Inside of another expression.
        ("x=1/2^{99}", "x=1/2^{98}", False),
        ("x<1/2^{99}", "x<1/2^{98}", False),
        ("(1/2^{99}, 2)", "(1/2^{98}, 2)", False),
        ("[0, 1/2^{99}]", "[0, 1/2^{98}]", False),
        (r"\{1/2^{99}, 2\}", r"\{1/2^{98}, 2\}", False),
        (r"\{1/2^{99}, 2\}", r"\{2, 2/2^{100}\}", True),
        (r"\begin{pmatrix}1/2^{99}&1\end{pmatrix}", r"\begin{pmatrix}1/2^{98}&1\end{pmatrix}", False),
        (r"\frac{x}{2^{99}}", r"\frac{x}{2^{98}}", False),
        # Equal in 12 digits and more.
        (r"e^{\pi\sqrt{163}}", "640320^3+744", False),
        (r"\sqrt{2}+10^{-50}", r"\sqrt{2}", False),
        (r"\pi", r"\frac{245850922}{78256779}", False),
        (r"\sqrt{2}+\sqrt{3}", r"\sqrt{5+2\sqrt{6}}", True),
        (r"x(\sqrt{2}+\sqrt{3})", r"x\sqrt{5+2\sqrt{6}}", True),
        (r"\cos(\pi/7)\cos(2\pi/7)\cos(3\pi/7)", "1/8", True),
        (r"\frac{\pi}{4}", r"4\arctan(1/5)-\arctan(1/239)", True),
        (r"2\ln 3+\ln 2", r"\ln 18", True),
        # Decimals may be rounded, to at least six places.
        (r"\frac{1}{3}", "0.333", False),
        (r"\frac{1}{3}", "0.333333", True),
        (r"\frac{1}{2}", "0.5", True),
        (r"\frac{3}{10}", "0.1+0.2", True),
        (r"\sqrt{2}", "1.414214", True),
        (r"\sqrt{2}", "1.4142", False),
        ("1/2^{99}", "0.0", False),
        ("0", "0.0000001", False),
        (r"1.6 \times 10^{-19}", r"\frac{16}{10^{20}}", True),
        (r"1.6 \times 10^{-19}", r"\frac{17}{10^{20}}", False),
        (r"\frac{1}{10^7}", "1e-7", True),
        (r"\frac{1}{10^7}", "2e-7", False),
        (r"2e+3", r"3+2e", True),
        ("7/2", "3 1/2", True),
        ("7/2", "3 1/3", False),
    ],
)
def test_values_are_compared_exactly(gold: str, answer: str, equal: bool) -> None:
    assert reward_of(gold, answer) == float(equal)
    assert equal or reward_of(answer, gold) == 0.0


def test_formula_equals_its_reformulation() -> None:
    for gold, answer in (("n!", "n(n-1)!"), (r"\frac{x^2-1}{x-1}", "x+1"), (r"\int_0^1 x dx", "1/2"), ("0.5x", "x/2")):
        assert reward_of(gold, answer) == 1.0


def test_unproven_equality_is_not_equality() -> None:
    judge = RewardMathFn(RewardConfig(unk_error_reward=-0.5), deadline_s=0.3)
    verdict = judge({"ground_truth": r"\sin(1)^2+\cos(1)^2+10^{-2000}"}, r"\boxed{1}")
    assert (verdict.reward, verdict.is_correct) == (-0.5, False)


_integers = st.integers(-(10**30), 10**30)
_positive = st.integers(1, 10**30)


@given(_integers, _positive, _positive, st.sampled_from([0, 0, 1, -1]), st.sampled_from(["/", "frac", "worker"]))
def test_random_rationals_are_compared_as_fractions(
    top: int, bottom: int, factor: int, change: int, spelling: str
) -> None:
    spell = {"/": "{}/{}", "frac": r"\frac{{{}}}{{{}}}", "worker": r"(\frac{{{}}}{{{}}})^1"}[spelling]
    one, other = (top, bottom), (top * factor + change, bottom * factor)
    assert reward_of(spell.format(*one), spell.format(*other)) == float(Fraction(*one) == Fraction(*other))


@given(st.integers(-(10**12), 10**12), st.integers(0, 12))
@example(digits=1149117, places=11)  # small, and so precise that the next number is within a millionth
def test_terminating_decimal_equals_its_fraction(digits: int, places: int) -> None:
    exact = Fraction(digits, 10**places)
    decimal = format(Decimal(digits).scaleb(-places), "f")
    assert reward_of(rf"\frac{{{exact.numerator}}}{{{exact.denominator}}}", decimal) == 1.0
    other = Fraction(exact.numerator + 1, exact.denominator)
    if max(abs(exact), abs(other)) < Fraction(1, 10**4):  # for these a millionth of the number itself is allowed
        is_same = abs(other - exact) <= abs(other) / 10**6
    else:
        is_same = round(exact, 6) == round(other, 6)
    assert reward_of(rf"\frac{{{exact.numerator + 1}}}{{{exact.denominator}}}", decimal) == float(is_same)
