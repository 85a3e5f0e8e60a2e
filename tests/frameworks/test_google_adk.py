import pytest

from .proof import Variant
from .rollouts import Framework

pytestmark = pytest.mark.frameworks

FRAMEWORK = Framework(name="google-adk", package="google-adk")
VARIANTS = [
    Variant(way="run", endpoint="chat"),
    Variant(way="stream", endpoint="chat", streaming=True),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_token_is_captured(variant, proven):
    proven(FRAMEWORK, variant)
