import pytest

from .proof import Variant
from .rollouts import Framework

pytestmark = pytest.mark.frameworks

FRAMEWORK = Framework(name="litellm", package="litellm")
VARIANTS = [
    Variant(way="openai", endpoint="chat"),
    Variant(way="openai_async", endpoint="chat"),
    Variant(way="openai_stream", endpoint="chat", streaming=True),
    Variant(way="hosted_vllm", endpoint="chat"),
    Variant(way="anthropic", endpoint="messages"),
    Variant(way="anthropic_stream", endpoint="messages", streaming=True),
    Variant(way="responses", endpoint="responses"),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_token_is_captured(variant, proven):
    proven(FRAMEWORK, variant)
