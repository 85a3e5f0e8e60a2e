import pytest

from .proof import Variant
from .rollouts import Framework
from .shell import called, copying
from .shopping import Speech

pytestmark = pytest.mark.frameworks

FRAMEWORK = Framework(name="qwen-code", package="@qwen-code/qwen-code")
SHELL = Speech(
    call=lambda prompt, arguments: called(
        "run_shell_command",
        # On a busy machine it returns no output of a command that exits at once.
        {"command": f"{copying(arguments)}; sleep 1", "is_background": False, "description": "Copy a price"},
    )
)
VARIANTS = [
    Variant(way="chat", endpoint="chat", streaming=True, speech=SHELL),
    Variant(way="messages", endpoint="messages", streaming=True, speech=SHELL),
    Variant(way="short", endpoint="chat", streaming=True, speech=SHELL, notes="with a custom prompt and few tools"),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_token_is_captured(variant, proven):
    proven(FRAMEWORK, variant)
