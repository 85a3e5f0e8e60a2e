"""Settings that are written like options, and what is taken for one."""

import pytest


@pytest.mark.parametrize(
    ("command", "option", "such_as"),
    [
        (["train", "my_agent.py:agent"], "--steps", "num_steps=100; `rllm config` lists them"),
        (["eval", "my_agent.py:agent"], "--max-tokens", "sampling.max_tokens=512; `rllm eval -h` shows both"),
        (["serve", "my_model"], "--model.dtype=bfloat16", "model.dtype=bfloat16; `rllm serve -h` shows both"),
    ],
)
def test_a_setting_with_dashes_is_told_how_settings_are_written(fails, command, option, such_as):
    code, errors = fails(*command, option, "1")
    name = option.partition("=")[0]
    assert code == 2
    assert errors.startswith(
        f"rllm: {name} is not an option of rllm {command[0]}: settings are written without dashes, such as {such_as}"
    )


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
