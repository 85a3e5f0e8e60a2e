"""A LangChain agent that summarizes its history, and asks another model for a part of its task.

It is run by the interpreter of `.frameworks/langgraph`, in a folder with the files of `errand.FILES`; it prints its answer.
"""

import os
import subprocess
import sys

from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

model = ChatOpenAI(model=os.environ.get("OPENAI_MODEL", "policy"))


@tool
def shell(command: str) -> str:
    """Run a command."""
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout


@tool
def delegate(task: str) -> str:
    """Delegate a part of the task."""
    helper = create_agent(model, [shell], middleware=[])
    return helper.invoke({"messages": [("user", task)]})["messages"][-1].content


@tool
def ask(task: str) -> str:
    """Ask a model without tools, which gets the menu."""
    menu = subprocess.run("cat menu/*", shell=True, capture_output=True, text=True).stdout
    return str(model.invoke(f"{task}\n\nThe menu:\n{menu}").content)


helper = {"delegate": delegate, "ask": ask}[sys.argv[1]]
summaries = SummarizationMiddleware(model=model, trigger=("tokens", 3000), keep=("messages", 1))
agent = create_agent(model, [shell, helper], middleware=[summaries])
print(agent.invoke({"messages": [("user", sys.argv[2])]}, {"recursion_limit": 60})["messages"][-1].content)  # noqa: T201
