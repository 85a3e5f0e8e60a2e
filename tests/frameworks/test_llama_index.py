import pytest

from .proof import Variant
from .rollouts import Framework
from .shopping import Speech

pytestmark = pytest.mark.frameworks

FRAMEWORK = Framework(name="llama-index", package="llama-index-core")
REACT = Speech(
    call=lambda prompt, arguments: f"Thought: I need a price.\nAction: price\nAction Input: {arguments}",
    final=lambda prompt, total: f"Thought: I can answer.\nAnswer: Together they cost {total} euro.",
)
REPRINTED = "replaces the model's text of a call by its own, as Python prints it"
VARIANTS = [
    Variant(way="function", endpoint="chat"),
    Variant(way="function_stream", endpoint="chat", streaming=True),
    Variant(way="openai", endpoint="chat"),
    Variant(way="react", endpoint="chat", speech=REACT, num_sequences=3, notes=REPRINTED),
    Variant(way="react_stream", endpoint="chat", streaming=True, speech=REACT, num_sequences=3, notes=REPRINTED),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_token_is_captured(variant, proven):
    proven(FRAMEWORK, variant)
