"""Invalid options: each error names the option, before anything starts."""

import subprocess
import sys
from dataclasses import fields

import pytest
from typer.main import get_command

from rllm import cli
from rllm.cli.options import NOT_OPTIONS, spelling_of
from rllm.gateway.config import GatewayConfig, PoolConfig
from rllm.sdk.programs import ProgramLimits
from rllm.store.maintenance import Retention

from .conftest import here


@pytest.mark.parametrize(
    ("command", "configs"), [("gateway", (GatewayConfig, PoolConfig, Retention)), ("run", (ProgramLimits,))]
)
def test_every_field_of_a_config_is_an_option(command, configs):
    options = {option.name: option for option in get_command(cli.app).commands[command].params}
    for field in (field for config in configs for field in fields(config) if field.name not in NOT_OPTIONS):
        option = options[field.name]
        assert spelling_of(field.name) in option.opts
        assert option.help
        assert option.default == (8080 if field.name == "port" else field.default)


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["eval", "my_agent.py:agent", "--dataset", "tasks.jsonl", "--model", "any"], "--timeout"),
        (["run", "--model", "any"], "--timeout"),
        (["gateway", "--upstream", "http://127.0.0.1:9/v1"], "--hold-s"),
        (["gateway", "--upstream", "http://127.0.0.1:9/v1"], "--silence-s"),
        (["gateway", "--upstream", "http://127.0.0.1:9/v1"], "--total-s"),
    ],
)
@pytest.mark.parametrize("seconds", ["0", "-1", "nan"])
def test_seconds_must_be_positive(work, fails, arguments, option, seconds):
    code, errors = fails(*arguments, option, seconds, *(["--", "true"] if arguments[0] == "run" else []))
    assert code == 2
    assert option in errors
    assert seconds in errors


def test_help_shows_no_placeholder_for_flags(work):
    for command in ([], ["train"], ["traces", "list"], ["store"]):
        shown = here(*command, "--help", cwd=work).stdout
        assert "--help" in shown
        assert "bool" not in shown.lower()


@pytest.mark.parametrize("columns", ["40", "80"])
@pytest.mark.parametrize("command", [[], ["eval"], ["gateway"], ["traces", "export"]])
def test_help_truncates_no_name_on_a_narrow_terminal(work, monkeypatch, columns, command):
    monkeypatch.setenv("COLUMNS", columns)
    assert "…" not in here(*command, "--help", cwd=work).stdout


@pytest.mark.parametrize(("named", "missing"), [("--split", "--data"), ("--val-split", "--val")])
def test_split_without_its_data_is_rejected(work, fails, named, missing):
    (work / "my_reward.py").write_text("def reward(task, answer):\n    return 1.0\n")
    code, errors = fails("rescore", "run", "--reward", "my_reward.py:reward", named, "test")
    assert (code, errors) == (2, f"rllm: {missing} is missing: {named} test has no effect without it\n")


def test_address_error_names_the_given_option(work, fails):
    for arguments in (
        ["eval", "my_agent.py:agent", "--dataset", "tasks.jsonl", "--base-url"],
        ["gateway", "--upstream"],
    ):
        code, errors = fails(*arguments, "nothing")
        assert (code, errors.startswith(f"rllm: {arguments[-1]}='nothing': use the base URL")) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "others"),
    [
        (["doctor"], ["--endpoint"]),
        (["eval", "my_agent.py:agent", "--dataset", "tasks.jsonl"], ["--upstream"]),
        (["run"], ["--upstream"]),
    ],
)
def test_server_option_has_the_same_names_in_all_commands(work, fails, arguments, others):
    for option in ("--base-url", *others):
        code, errors = fails(*arguments, option, "nothing", *(["--", "true"] if arguments == ["run"] else []))
        assert (code, "'nothing'" in errors) == (2, True)


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("import rllm.cli as cli; import sys; sys.platform = 'win32'; cli.main()", 2),
        ("import sys; sys.platform = 'win32'; from rllm import AgentTrainer", 1),
    ],
)
def test_windows_is_rejected_with_one_message(program, code):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert "WSL2" in done.stderr.splitlines()[-1]
