import pytest

from .proof import Variant
from .rollouts import Framework
from .shopping import Speech

pytestmark = pytest.mark.frameworks


def action(prompt, arguments):
    return f"Thought: I need a price.\nAction: price\nAction Input: {arguments}\nObservation:"


def final_answer(prompt, total):
    return f"Thought: I now know the final answer\nFinal Answer: Together they cost {total} euro."


FRAMEWORK = Framework(name="crewai", package="crewai")
REACT = Speech(call=action, final=final_answer)
KNOWN = "a model name that CrewAI knows; text next to a tool call is left out"
OTHER = "any other model: tools are called by text, and results written after past answers"
VARIANTS = [
    Variant(way="tools", endpoint="chat", notes=KNOWN),
    Variant(way="tools_stream", endpoint="chat", streaming=True, notes=KNOWN),
    Variant(way="react", endpoint="chat", speech=REACT, notes=OTHER),
    Variant(way="react_stream", endpoint="chat", streaming=True, speech=REACT, notes=OTHER),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_token_is_captured(variant, proven):
    proven(FRAMEWORK, variant)
