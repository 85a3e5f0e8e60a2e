"""Options that are given wrongly: each mistake is told of the option, before anything starts."""

import pytest


@pytest.mark.parametrize(
    "arguments",
    [
        ["eval", "my_agent.py:agent", "--dataset", "tasks.jsonl", "--model", "any", "--timeout"],
        ["run", "--model", "any", "--timeout"],
        ["gateway", "--upstream", "http://127.0.0.1:9/v1", "--hold-s"],
        ["gateway", "--upstream", "http://127.0.0.1:9/v1", "--silence-s"],
        ["gateway", "--upstream", "http://127.0.0.1:9/v1", "--total-s"],
    ],
)
@pytest.mark.parametrize("seconds", ["0", "-1", "nan"])
def test_seconds_are_above_zero(work, fails, arguments, seconds):
    code, errors = fails(*arguments, seconds, *(["--", "true"] if arguments[0] == "run" else []))
    assert code == 2
    assert f"'{arguments[-1]}': {seconds}: use a number of seconds above 0" in " ".join(errors.split())


@pytest.mark.parametrize(("named", "said"), [("--split", "--data is missing"), ("--val-split", "--val is missing")])
def test_a_part_of_nothing_is_refused(work, fails, named, said):
    (work / "my_reward.py").write_text("def reward(task, answer):\n    return 1.0\n")
    code, errors = fails("rescore", "run", "--reward", "my_reward.py:reward", named, "test")
    assert (code, errors) == (2, f"rllm: {said}: a part of it, 'test', is named\n")


def test_an_address_is_told_by_no_other_options_name(work, fails):
    for arguments in (
        ["eval", "my_agent.py:agent", "--dataset", "tasks.jsonl", "--base-url"],
        ["gateway", "--upstream"],
    ):
        code, errors = fails(*arguments, "nothing")
        assert (code, errors.startswith("rllm: 'nothing' is no address of a server")) == (2, True)


def test_a_setting_with_dashes_is_told_how_settings_are_written(fails):
    code, errors = fails("train", "my_agent.py:agent", "--steps", "1")
    assert code == 2
    assert errors.startswith("rllm: --steps is no option of rllm train: settings are written without dashes")
    code, errors = fails("train", "my_agent.py:agent", "--dat", "tasks.jsonl")
    assert (code, "--data" in errors) == (2, True), "what is nearly an option is one"
    code, errors = fails("train", "my_agent.py:agent", "--data", "tasks.jsonl", "--", "num_steps=1")
    assert (code, "no option" in errors) == (2, False), "what follows two dashes is none"
    code, errors = fails("demo", "--steps", "1")
    assert (code, "No such option" in errors) == (2, True), "the demo takes no settings"
