"""mini-swe-agent on a small task with files: `python agent.py tools` (or one of `WAYS`), in an empty folder.

It asks through LiteLLM, which takes OPENAI_BASE_URL and OPENAI_API_KEY from the environment; nothing here depends on rllm.
"""

import os
import subprocess
import sys
from pathlib import Path

MODEL = os.environ.get("OPENAI_MODEL", "policy")
TASK = "prices.txt has prices. Add the lines of crème brûlée and of café au lait to bill.txt, and say what they cost together."
PRICES = "42.85 euro for crème brûlée in a box\n6.20 euro for café au lait in a cup\n9.10 euro for a tarte tatin\n"


def mini(*options: str) -> str:
    """Run mini-swe-agent, and return its answer once it has written the bill."""
    Path("prices.txt").write_text(PRICES)
    command = ["mini", "--model", f"openai/{MODEL}", "--task", TASK, "--yolo", "--exit-immediately", *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert len(Path("bill.txt").read_text().splitlines()) == 2
    return done.stdout


WAYS = {
    "tools": mini,
    "text": lambda: mini("--config", "mini_textbased.yaml", "--model-class", "litellm_textbased"),
    "responses": lambda: mini("--model-class", "litellm_response"),
}

if __name__ == "__main__":
    print(WAYS[sys.argv[1]]())
