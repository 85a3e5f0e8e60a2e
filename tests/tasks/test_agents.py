"""Agents by name, and the text protocol of terminus."""

from __future__ import annotations

import pytest

from rllm.errors import ConfigError
from rllm.sandbox import ExecResult
from rllm.tasks.agents.named import agent_names, open_agent
from rllm.tasks.agents.terminus import Terminus, command_in, shown_output


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("ls -la", "ls -la"),
        ("  mv a b\n", "mv a b"),
        ("I list them:\n```sh\nls -la\n```\nThen I go on.", "ls -la"),
        ("```\nfor f in *; do\n  echo $f\ndone\n```", "for f in *; do\n  echo $f\ndone"),
        ("```ls```", "ls"),
        ("<think>\n```rm -r .```?\n</think>\n\ndone", "done"),
    ],
)
def test_commands_are_parsed_from_an_answer(text: str, command: str) -> None:
    assert command_in(text) == command


def test_model_gets_output_and_failure() -> None:
    assert shown_output(ExecResult(exit_code=0, stdout="a\nb\n", stderr=""), 100, 60) == "a\nb"
    assert shown_output(ExecResult(exit_code=0, stdout="", stderr=""), 100, 60) == "[exit code 0]"
    assert shown_output(ExecResult(exit_code=2, stdout="", stderr="no\n"), 100, 60) == "no\n[exit code 2]"
    killed = ExecResult(exit_code=-9, stdout="", stderr="", timed_out=True)
    assert shown_output(killed, 100, 60) == "[killed after 60 seconds]"
    long = shown_output(ExecResult(exit_code=0, stdout="a" * 50 + "b" * 50, stderr=""), 20, 60)
    assert long == "aaaaaaaaaa\n[80 characters left out]\nbbbbbbbbbb"


def test_agents_have_names() -> None:
    assert open_agent("terminus", max_steps=3).max_steps == 3
    assert open_agent("terminus-tools").tools
    assert open_agent("mini-swe-agent@2.4.5").version == "2.4.5"
    assert {"claude-code", "codex", "opencode", "qwen-code", "mini-swe-agent"} < agent_names().keys()


@pytest.mark.parametrize(
    ("spec", "options", "named"),
    [
        ("terminis", {}, "'terminus'"),
        ("codeks", {}, "'codex'"),
        ("mini-swe-agent", {"max_steps": 3}, "max_steps=3"),
        ("nowhere.py:agent", {}, "nowhere.py"),
    ],
)
def test_unknown_agent_is_rejected(spec: str, options: dict[str, int], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        open_agent(spec, **options)


def test_program_installed_by_npm_requires_npm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"agent=codex .* npm"):
        open_agent("codex")


def test_function_with_unknown_parameters_is_rejected() -> None:
    with pytest.raises(ConfigError, match="'repository'"):
        open_agent(f"{__name__}:needs_more")


def needs_more(sandbox: object, repository: str) -> None: ...


def test_terminus_needs_no_preparation() -> None:
    assert Terminus().mounts == {}
