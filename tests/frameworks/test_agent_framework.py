import pytest

from .proof import Variant
from .rollouts import Framework

pytestmark = pytest.mark.frameworks

FRAMEWORK = Framework(name="agent-framework", package="agent-framework-core")
PREVIOUS = "`previous_response_id`: each request has only the new messages"
VARIANTS = [
    Variant(way="chat", endpoint="chat"),
    Variant(way="chat_stream", endpoint="chat", streaming=True),
    Variant(way="responses", endpoint="responses", notes=PREVIOUS),
    Variant(way="responses_stream", endpoint="responses", streaming=True, notes=PREVIOUS),
    Variant(
        way="responses_session",
        endpoint="responses",
        num_calls=4,
        notes=f"two runs in one session; {PREVIOUS}",
    ),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_token_is_captured(variant, proven):
    proven(FRAMEWORK, variant)
