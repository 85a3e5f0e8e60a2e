"""A shop assistant on CrewAI, which asks a tool for prices: `python agent.py tools` (or one of `WAYS`).

Its models take OPENAI_BASE_URL and OPENAI_API_KEY from the environment; nothing here depends on rllm.
"""

import os
import sys

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from pydantic import BaseModel

MODEL = os.environ.get("OPENAI_MODEL", "policy")
KNOWN = "gpt-4o-mini"  # CrewAI calls tools by text, unless it knows the model by its name.
QUESTION = "What do seven crèmes brûlées, gift-wrapped, and two cafés au lait cost together?"
PRICES = {"crème brûlée": 6.05, "café au lait": 3.10}


class Packing(BaseModel):
    paper: str
    gift: bool


@tool("price")
def price(item: str, quantity: float, packing: Packing) -> str:
    """Return the price of a number of items, packed."""
    packed = Packing.model_validate(packing)  # it comes as a dict
    total = quantity * PRICES[item] + (0.50 if packed.gift else 0)
    return f"{total:.2f} euro for {item} in {packed.paper} paper"


def crew(llm: LLM) -> str:
    assistant = Agent(
        role="Shop assistant",
        goal="Tell customers what they ask",
        backstory="You help the customers of a pastry shop.",
        tools=[price],
        llm=llm,
    )
    task = Task(description=QUESTION, expected_output="The total in euro", agent=assistant)
    return Crew(agents=[assistant], tasks=[task]).kickoff().raw


WAYS = {
    "tools": lambda: crew(LLM(model=f"openai/{KNOWN}")),
    "tools_stream": lambda: crew(LLM(model=f"openai/{KNOWN}", stream=True)),
    "react": lambda: crew(LLM(model=f"openai/{MODEL}")),
    "react_stream": lambda: crew(LLM(model=f"openai/{MODEL}", stream=True)),
}

if __name__ == "__main__":
    print(WAYS[sys.argv[1]]())
