import pytest

from .proof import Variant
from .rollouts import Framework
from .shopping import Speech

pytestmark = pytest.mark.frameworks


def sum_or_approval(prompt, total):
    return f"{total} euro is right. APPROVED" if "You check sums." in prompt else f"Together they cost {total} euro."


FRAMEWORK = Framework(name="autogen", package="autogen-agentchat")
VARIANTS = [
    Variant(way="assistant", endpoint="chat"),
    Variant(way="assistant_stream", endpoint="chat", streaming=True),
    Variant(
        way="team",
        endpoint="chat",
        speech=Speech(final=sum_or_approval),
        num_calls=6,
        num_sequences=2,
        notes="two agents take turns: each has a conversation of its own",
    ),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_token_is_captured(variant, proven):
    proven(FRAMEWORK, variant)
