from dataclasses import replace

import pytest

from .proof import Variant, prove
from .rollouts import Framework
from .shopping import HURRIED, PLAIN, Mood, Speech

pytestmark = pytest.mark.frameworks

FRAMEWORK = Framework(name="openai", package="openai")
OBJECT = Speech(final=lambda prompt, total: f'{{"total": {total}}}')
SILENT_THINKING = Mood(name="thinking", thinks=True, comments=False)
VARIANTS = [
    Variant(way="sync", endpoint="chat"),
    Variant(way="async", endpoint="chat"),
    Variant(way="deltas", endpoint="chat", streaming=True, notes="a stream put together by hand"),
    Variant(way="stream", endpoint="chat", streaming=True),
    Variant(
        way="parse",
        endpoint="chat",
        speech=OBJECT,
        moods=(SILENT_THINKING, PLAIN),
        notes="text next to a tool call is read as the answer's JSON, and raises in the SDK",
    ),
    Variant(way="responses", endpoint="responses"),
    Variant(way="responses_stream", endpoint="responses", streaming=True),
    Variant(way="previous_response", endpoint="responses", notes="each request has only the new messages"),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_token_is_captured(variant, proven):
    proven(FRAMEWORK, variant)


@pytest.mark.parametrize("way", ["sync", "responses", "stream"])
def test_concurrent_calls_stay_in_one_sequence(way, engine):
    variant = next(variant for variant in VARIANTS if variant.way == way)
    prove(FRAMEWORK, replace(variant, moods=(HURRIED,), num_calls=2), engine)
