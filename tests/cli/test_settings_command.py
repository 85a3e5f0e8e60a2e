"""Settings that are written like options, and similar arguments."""

import pytest


@pytest.mark.parametrize(
    ("command", "option"),
    [("train", "--steps"), ("eval", "--max-tokens"), ("serve", "--model.dtype=bfloat16")],
)
def test_dashed_setting_error_shows_the_syntax(fails, command, option):
    code, errors = fails(command, "my_agent.py:agent", option, "1")
    assert code == 2
    assert errors.startswith(f"rllm: {option.partition('=')[0]} is not an option of rllm {command}: settings")


def test_misspelled_option_error_suggests_the_option(fails):
    code, errors = fails("train", "my_agent.py:agent", "--dat", "tasks.jsonl")
    assert (code, "--data" in errors) == (2, True)
    code, errors = fails("eval", "my_agent.py:agent", "--dat", "tasks.jsonl")
    assert (code, "--data" in errors) == (2, True)


def test_arguments_after_two_dashes_are_not_options(fails):
    code, errors = fails("train", "my_agent.py:agent", "--data", "tasks.jsonl", "--", "num_steps=1")
    assert (code, "no option" in errors) == (2, False)


@pytest.mark.parametrize("command", [["demo"], ["view"]])
def test_commands_without_settings_do_not_mention_them(fails, command):
    code, errors = fails(*command, "--steps", "1")
    assert (code, "No such option" in errors, "settings" in errors) == (2, True, False)
