import pytest

from .proof import Variant
from .rollouts import Framework

pytestmark = pytest.mark.frameworks

FRAMEWORK = Framework(name="openai-agents", package="openai-agents")
VARIANTS = [
    Variant(way="chat", endpoint="chat"),
    Variant(way="chat_stream", endpoint="chat", streaming=True),
    Variant(way="responses", endpoint="responses"),
    Variant(way="responses_stream", endpoint="responses", streaming=True),
    Variant(way="previous_response", endpoint="responses", notes="each request has only the new messages"),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_token_is_captured(variant, proven):
    proven(FRAMEWORK, variant)
