import pytest

from .proof import Variant
from .rollouts import Framework

pytestmark = pytest.mark.frameworks

FRAMEWORK = Framework(name="langgraph", package="langgraph")
VARIANTS = [
    Variant(way="create_agent", endpoint="chat"),
    Variant(way="create_agent_async", endpoint="chat"),
    Variant(way="create_agent_stream", endpoint="chat", streaming=True),
    Variant(way="graph", endpoint="chat", notes="a `StateGraph`"),
    Variant(way="graph_stream", endpoint="chat", streaming=True, notes="a `StateGraph`"),
    Variant(way="injected", endpoint="chat", notes="`ChatOpenAI` with a client that is given to it"),
    Variant(way="responses", endpoint="responses"),
    Variant(way="responses_stream", endpoint="responses", streaming=True),
    Variant(way="anthropic", endpoint="messages", notes="`ChatAnthropic`"),
    Variant(way="anthropic_stream", endpoint="messages", streaming=True, notes="`ChatAnthropic`"),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_token_is_captured(variant, proven):
    proven(FRAMEWORK, variant)
