"""Agents that compact their history and delegate, unmodified: all samples are trained once."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rllm.types import text_of

from . import errand
from .errand import Errand
from .proof import check_tokens, check_trained_once
from .rollouts import Framework, Run, num_sequences_of
from .shell import called

pytestmark = pytest.mark.frameworks

CODEX_SETTINGS = """
model = 'policy'
model_provider = 'gateway'
model_auto_compact_token_limit = 20000
[features]
multi_agent = true
[model_providers.gateway]
name = 'gateway'
base_url = '$OPENAI_BASE_URL'
env_key = 'OPENAI_API_KEY'
"""
OPENCODE_SETTINGS = {
    "autoupdate": False,
    "share": "disabled",
    "provider": {
        "gateway": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"},
            "models": {"policy": {"tool_call": True, "limit": {"context": 20_000, "output": 2000}}},
        }
    },
}


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program with a window so small that it compacts, and its format of tool calls."""

    framework: Framework
    command: list[str]
    script: Errand
    variables: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)


def described(**arguments: str) -> dict[str, str]:
    return {"description": "Look it up", **arguments}


def claude_code() -> Program:
    prompt = ["--print", errand.TASK, "--model", "policy", "--system-prompt", "You do what is asked."]
    return Program(
        framework=Framework(name="claude-code", package="@anthropic-ai/claude-code"),
        command=["claude", *prompt, "--tools", "Bash,Task", "--allowedTools", "Bash,Task"],
        script=Errand(
            summary_asked="an <analysis> block followed by a <summary> block",
            shell=lambda command: called("Bash", described(command=command)),
            delegate=lambda task: called("Agent", described(prompt=task, subagent_type="general-purpose")),
        ),
        variables={
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": "100000",
            "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": "8",
            "CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1",
        },
    )


def codex() -> Program:
    start = 'codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox "$0"'
    return Program(
        framework=Framework(name="codex", package="@openai/codex"),
        command=["sh", "-c", f'mkdir .codex; echo "{CODEX_SETTINGS}" > .codex/config.toml; {start}', errand.TASK],
        script=Errand(
            summary_asked="CONTEXT CHECKPOINT COMPACTION",
            shell=lambda command: called("exec_command", {"cmd": command}),
            delegate=lambda task: called("multi_agent_v1__spawn_agent", {"message": task}),
            wait=lambda agent: called("multi_agent_v1__wait_agent", {"targets": [agent], "timeout_ms": 60_000}),
        ),
    )


def opencode() -> Program:
    return Program(
        framework=Framework(name="opencode", package="opencode-ai"),
        command=["opencode", "run", "--model", "gateway/policy", errand.TASK],
        script=Errand(
            summary_asked="Here is the conversation so far",
            shell=lambda command: called("bash", described(command=command)),
            delegate=lambda task: called("task", described(prompt=task, subagent_type="general")),
        ),
        files={"opencode.json": json.dumps(OPENCODE_SETTINGS)},
    )


def langgraph(tool: str = "delegate") -> Program:
    """Return a graph that delegates to another one with tools, or by its tool `ask` to a model without any."""
    framework = Framework(name="langgraph", package="langgraph")
    return Program(
        framework=framework,
        command=[str(framework.python), str(Path(__file__).with_name("compacting_graph.py")), tool, errand.TASK],
        script=Errand(
            summary_asked="Messages to summarize",
            shell=lambda command: called("shell", {"command": command}),
            delegate=lambda task: called(tool, {"task": task}),
        ),
    )


@pytest.mark.parametrize(
    "program",
    [claude_code, codex, opencode, langgraph, pytest.param(lambda: langgraph("ask"), id="langgraph_without_tools")],
)
def test_all_segments_are_trained_once_with_the_advantage_of_the_rollout(program, engine):
    program = program()
    run = Run(
        command=program.command,
        script=program.script,
        variables={**program.framework.variables, **program.variables},
        files={**errand.FILES, **program.files},
    )
    rollout, episode = run.by_rllm_run(engine, "mine")
    assert errand.FINAL in rollout.program.stdout, rollout.program.stdout
    assert [info.id for info in rollout.store.sessions()] == ["mine"]
    assert {text_of(trace.response) for trace in rollout.traces if trace.id in rollout.side_calls} <= {errand.TITLE}
    check_tokens(rollout)
    check_trained_once(episode, rollout.turns)

    steps = episode.trajectories[0].steps
    answers = [text_of(step.chat_completions[-1]) for step in steps]
    assert errand.SUMMARY in answers
    assert errand.FOUND in answers, "the sub-agent's answer"
    prompts = [engine.tokenizer.decode(step.prompt_ids) for step in steps]
    assert errand.REMEMBERED in prompts[answers.index(errand.FINAL)], "the agent continued from the summary"
    assert num_sequences_of(rollout.turns) >= 3, "the conversation, its continuation, and the sub-agent's"
