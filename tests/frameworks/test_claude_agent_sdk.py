import pytest

from .proof import Variant
from .rollouts import Framework
from .shopping import Speech

pytestmark = pytest.mark.frameworks

FRAMEWORK = Framework(name="claude-agent-sdk", package="claude-agent-sdk")
VARIANTS = [
    Variant(way="query", endpoint="messages", streaming=True),
    Variant(way="client", endpoint="messages", streaming=True),
    Variant(way="partial", endpoint="messages", streaming=True),
    Variant(
        way="titled",
        endpoint="messages",
        streaming=True,
        num_side_calls=1,
        speech=Speech(aside=lambda prompt: None if "mcp__shop__price" in prompt else '{"title": "Prices"}'),
        variables={"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": ""},
        notes="Claude Code requests a title unless this is disabled, which is the default",
    ),
    Variant(
        way="claude_code",
        endpoint="messages",
        streaming=True,
        notes="with Claude Code's own prompt and its tools for files",
    ),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_token_is_captured(variant, proven):
    proven(FRAMEWORK, variant)
