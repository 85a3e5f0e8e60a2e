from dataclasses import replace

import pytest

from .proof import Variant, prove
from .rollouts import Framework
from .shopping import HURRIED

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


@pytest.mark.parametrize("way", ["chat"])
def test_concurrent_calls_stay_in_one_sequence(way, engine):
    variant = next(variant for variant in VARIANTS if variant.way == way)
    prove(FRAMEWORK, replace(variant, moods=(HURRIED,), num_calls=2), engine)
