import pytest

from .proof import Variant
from .rollouts import Framework

pytestmark = pytest.mark.frameworks

FRAMEWORK = Framework(name="pydantic-ai", package="pydantic-ai-slim")
VARIANTS = [
    Variant(way="chat", endpoint="chat"),
    Variant(way="chat_stream", endpoint="chat", streaming=True),
    Variant(way="responses", endpoint="responses"),
    Variant(way="responses_stream", endpoint="responses", streaming=True),
    Variant(way="anthropic", endpoint="messages"),
    Variant(way="anthropic_stream", endpoint="messages", streaming=True),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_token_is_captured(variant, proven):
    proven(FRAMEWORK, variant)
