from rllm.tracking.samples import sample_rows
from rllm.types import Episode, Step, TerminationReason, Trajectory


def episode(index: int, reward: float | None) -> Episode:
    return Episode(task_id="t", index=index, trajectories=[Trajectory(reward=reward)])


def test_samples_are_evenly_spaced_from_worst_to_best() -> None:
    episodes = [episode(index, reward) for index, reward in enumerate([0.5, 0.0, 0.75, 1.0, 0.25, None, 0.6])]
    rows = sample_rows(3, episodes, most=4)
    assert [(row[0], row[1], row[3]) for row in rows] == [
        (3, "t:5", None),
        (3, "t:4", 0.25),
        (3, "t:6", 0.6),
        (3, "t:3", 1.0),
    ]


def test_same_episodes_give_the_same_rows_in_any_order() -> None:
    episodes = [episode(index, 1.0) for index in range(9)]
    assert sample_rows(1, episodes, most=4) == sample_rows(1, episodes[::-1], most=4)


def test_row_has_the_outcome_and_the_conversation() -> None:
    call = {"function": {"name": "price", "arguments": '{"item": "fig"}'}}
    chat = [
        {"role": "user", "content": "A fig?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "text", "text": "3"}]},
    ]
    done = Episode(
        id="figs:2",
        termination_reason=TerminationReason.ENV_DONE,
        is_correct=True,
        trajectories=[Trajectory(name="buyer", reward=1.0, steps=[Step(chat_completions=chat)])],
    )
    failed = Episode(id="figs:3", info={"error": {"type": "AgentError"}}, trajectories=[Trajectory()])
    message = 'user: A fig?\n\nassistant: price({"item": "fig"})\n\ntool: 3'
    assert sample_rows(7, [done, failed], most=4) == [
        [7, "figs:3", "agent", None, False, "AgentError", ""],
        [7, "figs:2", "buyer", 1.0, True, "env_done", message],
    ]


def test_unpaired_surrogate_does_not_stop_a_tracker() -> None:
    step = Step(chat_completions=[{"role": "user", "content": "A \ud83d?"}])
    [row] = sample_rows(1, [Episode(id="figs:2", trajectories=[Trajectory(steps=[step])])], most=4)
    assert row[-1] == "user: A \\ud83d?"
