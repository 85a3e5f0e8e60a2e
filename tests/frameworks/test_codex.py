import pytest

from .proof import Variant
from .rollouts import Framework
from .shell import called, copying
from .shopping import Speech

pytestmark = pytest.mark.frameworks

FRAMEWORK = Framework(name="codex", package="@openai/codex")
SHELL = Speech(call=lambda prompt, arguments: called("exec_command", {"cmd": copying(arguments)}))
VARIANTS = [Variant(way="exec", endpoint="responses", streaming=True, speech=SHELL)]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_token_is_captured(variant, proven):
    proven(FRAMEWORK, variant)
