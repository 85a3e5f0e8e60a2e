import runpy

import pytest

from .proof import Variant, check_captured, check_returned_episode
from .rollouts import EXAMPLES, Framework, Run
from .shell import called, copying
from .shopping import THINKING, Speech

pytestmark = pytest.mark.frameworks

FRAMEWORK = Framework(name="claude-code", package="@anthropic-ai/claude-code")
SHELL = Speech(
    call=lambda prompt, arguments: called("Bash", {"command": copying(arguments), "description": "Copy a price"})
)
VARIANTS = [
    Variant(
        way="print",
        endpoint="messages",
        streaming=True,
        speech=SHELL,
        notes="with Claude Code's own prompt and all of its tools",
    ),
    Variant(way="short", endpoint="messages", streaming=True, speech=SHELL, notes="with a custom prompt and one tool"),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_token_is_captured(variant, proven):
    proven(FRAMEWORK, variant)


def test_rllm_run_returns_every_token_of_the_command(engine):
    example = runpy.run_path(str(EXAMPLES / FRAMEWORK.name / "agent.py"))
    run = Run(
        command=["claude", "--print", example["TASK"], "--model", "policy", "--allowedTools", "Bash"],
        mood=THINKING,
        speech=SHELL,
        variables=FRAMEWORK.variables,
        files={"prices.txt": example["PRICES"]},
    )
    rollout, episode = run.by_rllm_run(engine, "mine")
    check_captured(rollout, VARIANTS[0])
    check_returned_episode(episode, rollout)
