import pytest

from .proof import Variant
from .rollouts import Framework
from .shell import called, copying
from .shopping import Speech

pytestmark = pytest.mark.frameworks

FRAMEWORK = Framework(name="claude-code", package="@anthropic-ai/claude-code")
SHELL = Speech(
    call=lambda prompt, arguments: called("Bash", {"command": copying(arguments), "description": "Copy a price"})
)
VARIANTS = [
    Variant(way="print", endpoint="messages", streaming=True, speech=SHELL),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_token_is_captured(variant, proven):
    proven(FRAMEWORK, variant)
