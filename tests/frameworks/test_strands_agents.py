import pytest

from .proof import Variant
from .rollouts import Framework

pytestmark = pytest.mark.frameworks

FRAMEWORK = Framework(name="strands-agents", package="strands-agents")
VARIANTS = [
    Variant(way="openai", endpoint="chat", streaming=True),
    Variant(way="openai_async", endpoint="chat", streaming=True),
    Variant(way="responses", endpoint="responses", streaming=True),
    Variant(way="anthropic", endpoint="messages", streaming=True),
    Variant(way="litellm", endpoint="chat", streaming=True),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_token_is_captured(variant, proven):
    proven(FRAMEWORK, variant)
