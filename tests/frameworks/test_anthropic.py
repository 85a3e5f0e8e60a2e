from dataclasses import replace

import pytest

from .proof import Variant, prove
from .rollouts import Framework
from .shopping import HURRIED

pytestmark = pytest.mark.frameworks

FRAMEWORK = Framework(name="anthropic", package="anthropic")
THREADS = "asks for a thread on the server, is refused, and sends the whole conversation"
VARIANTS = [
    Variant(way="create", endpoint="messages"),
    Variant(way="async", endpoint="messages"),
    Variant(way="stream", endpoint="messages", streaming=True),
    Variant(way="tool_runner", endpoint="messages", notes=THREADS),
    Variant(way="tool_runner_stream", endpoint="messages", streaming=True, notes=THREADS),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_token_is_captured(variant, proven):
    proven(FRAMEWORK, variant)


@pytest.mark.parametrize("way", ["create", "stream"])
def test_concurrent_calls_stay_in_one_sequence(way, engine):
    variant = next(variant for variant in VARIANTS if variant.way == way)
    prove(FRAMEWORK, replace(variant, moods=(HURRIED,), num_calls=2), engine)
