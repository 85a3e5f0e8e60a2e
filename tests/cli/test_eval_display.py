import io

from rich.console import Console

from rllm.cli.display import EvaluationDisplay, show_report
from rllm.evaluation.evaluate import Progress
from rllm.evaluation.report import Cost, Outcome, report_on


def console(**options):
    return Console(file=io.StringIO(), width=100, highlight=False, **options)


def progress(num_done, num_planned=40):
    return Progress(num_planned=num_planned, num_done=num_done, num_kept=4, num_correct=num_done // 2, num_failed=1)


def test_progress_in_a_pipe_prints_each_tenth():
    plain = console()
    display = EvaluationDisplay(plain)
    for num_done in range(4, 41):
        display(progress(num_done))
    display.close()
    lines = plain.file.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0] == "4/40 rollouts, 2 correct, 1 failed, 4 kept"
    assert lines[-1] == "40/40 rollouts, 20 correct, 1 failed, 4 kept"


def test_terminal_shows_a_progress_bar():
    terminal = console(force_terminal=True)
    display = EvaluationDisplay(terminal)
    display(progress(10))
    display.close()
    shown = terminal.file.getvalue()
    assert "10/40" in shown
    assert "5 correct, 1 failed" in shown


def shown(outcomes):
    plain = console()
    show_report(plain, "agent [b]", report_on(outcomes))
    return [line.strip() for line in plain.file.getvalue().splitlines() if line.strip()]


def test_report_shows_powers_of_two_roles_and_failures():
    right = [
        Outcome(
            task_id="a", index=index, is_correct=True, rewards={"solver": 1.0, "judge": 0.5}, cost=Cost(seconds=2.0)
        )
        for index in range(6)
    ]
    failures = [Outcome(task_id="b", index=index, failure=f"AgentError: {'abcd'[index]}[/]") for index in range(4)]
    assert shown([*right, *failures]) == [
        "agent [b]",
        "accuracy     50.0% [9.5%, 90.5%]",
        "pass@2       50.0% [9.5%, 90.5%]",
        "pass@4       50.0% [9.5%, 90.5%]",
        "pass@6       100.0% [20.7%, 100.0%]",
        "mean reward  0.750 (judge 0.500, solver 1.000)",
        "tasks        2: 1 always solved, 0 sometimes, 1 never",
        "one rollout  tokens unknown (not every call has token ids), 2.00 s",
        "4 of 10 rollouts failed and count as wrong:",
        "1 x AgentError: a[/]",
        "1 x AgentError: b[/]",
        "1 x AgentError: c[/]",
        "and 1 more kind; report.json has them all",
    ]


def test_report_states_that_nothing_was_scored():
    lines = shown([Outcome(task_id="a", index=0, unscored="it has no reward")])
    assert lines[1] == "accuracy     - (nothing was scored)"
    assert lines[-2:] == ["1 of 1 rollouts were not scored and are left out:", "1 x it has no reward"]
