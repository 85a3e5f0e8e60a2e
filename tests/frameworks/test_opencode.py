import pytest

from .proof import Variant
from .rollouts import Framework
from .shell import called, copying
from .shopping import Speech

pytestmark = pytest.mark.frameworks

FRAMEWORK = Framework(name="opencode", package="opencode-ai")
SHELL = Speech(
    call=lambda prompt, arguments: called("bash", {"command": copying(arguments), "description": "Copy a price"}),
    aside=lambda prompt: None if '"name": "bash"' in prompt else "Prices",
)
VARIANTS = [
    Variant(way="chat", endpoint="chat", streaming=True, num_side_calls=1, speech=SHELL),
    Variant(way="responses", endpoint="responses", streaming=True, num_side_calls=1, speech=SHELL),
    Variant(way="messages", endpoint="messages", streaming=True, num_side_calls=1, speech=SHELL),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_token_is_captured(variant, proven):
    proven(FRAMEWORK, variant)
