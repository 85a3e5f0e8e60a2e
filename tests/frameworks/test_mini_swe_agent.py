import pytest

from .proof import Variant
from .rollouts import Framework
from .shell import called, copying
from .shopping import Speech

pytestmark = pytest.mark.frameworks

FRAMEWORK = Framework(name="mini-swe-agent", package="mini-swe-agent")


def submitting(total: str) -> str:
    return f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo 'Together they cost {total} euro.'"


def block(command: str) -> str:
    return f"THOUGHT: one command at a time.\n\n```mswea_bash_command\n{command}\n```"


TOOLS = Speech(
    call=lambda prompt, arguments: called("bash", {"command": copying(arguments)}),
    final=lambda prompt, total: called("bash", {"command": submitting(total)}),
)
TEXT = Speech(
    call=lambda prompt, arguments: block(copying(arguments)),
    final=lambda prompt, total: block(submitting(total)),
)
VARIANTS = [
    Variant(way="tools", endpoint="chat", speech=TOOLS),
    Variant(
        way="text",
        endpoint="chat",
        speech=TEXT,
        notes="commands are blocks in the text, and their output is what the user says",
    ),
    Variant(way="responses", endpoint="responses", speech=TOOLS),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_token_is_captured(variant, proven):
    proven(FRAMEWORK, variant)
