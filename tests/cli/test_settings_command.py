"""Settings that are written like options, and what is taken for one."""

import pytest


@pytest.mark.parametrize(
    ("command", "option"),
    [("train", "--steps"), ("eval", "--max-tokens"), ("serve", "--model.dtype=bfloat16")],
)
def test_a_setting_with_dashes_is_explained(fails, command, option):
    code, errors = fails(command, "my_agent.py:agent", option, "1")
    assert code == 2
    assert errors.startswith(f"rllm: {option.partition('=')[0]} is not an option of rllm {command}: settings")


def test_what_is_nearly_an_option_is_one(fails):
    code, errors = fails("train", "my_agent.py:agent", "--dat", "tasks.jsonl")
    assert (code, "--data" in errors) == (2, True)
    code, errors = fails("eval", "my_agent.py:agent", "--dat", "tasks.jsonl")
    assert (code, "--data" in errors) == (2, True)


def test_what_follows_two_dashes_is_no_option(fails):
    code, errors = fails("train", "my_agent.py:agent", "--data", "tasks.jsonl", "--", "num_steps=1")
    assert (code, "no option" in errors) == (2, False)


@pytest.mark.parametrize("command", [["demo"], ["view"]])
def test_a_command_without_settings_does_not_speak_of_them(fails, command):
    code, errors = fails(*command, "--steps", "1")
    assert (code, "No such option" in errors, "settings" in errors) == (2, True, False)
