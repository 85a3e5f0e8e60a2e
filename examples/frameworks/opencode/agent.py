"""OpenCode on a small task with files: `python agent.py responses` (or one of `PROVIDERS`), in an empty folder.

Its own configuration file names the URL, OPENAI_BASE_URL or ANTHROPIC_BASE_URL; nothing here depends on rllm.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

MODEL = os.environ.get("OPENAI_MODEL", "policy")
TASK = "prices.txt has prices. Add the lines of crème brûlée and of café au lait to bill.txt, and say what they cost together."
PRICES = "42.85 euro for crème brûlée in a box\n6.20 euro for café au lait in a cup\n9.10 euro for a tarte tatin\n"
PROVIDERS = {
    "chat": ("@ai-sdk/openai-compatible", "OPENAI_BASE_URL", "OPENAI_API_KEY"),
    "responses": ("@ai-sdk/openai", "OPENAI_BASE_URL", "OPENAI_API_KEY"),
    "messages": ("@ai-sdk/anthropic", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"),
}


def run(way: str) -> str:
    """Run OpenCode, and return its answer once it has written the bill."""
    package, url, key = PROVIDERS[way]
    provider = {
        "npm": package,
        "options": {"baseURL": os.environ[url], "apiKey": os.environ[key]},
        "models": {MODEL: {"tool_call": True, "limit": {"context": 131_072, "output": 8192}}},
    }
    Path("opencode.json").write_text(
        json.dumps({"provider": {"gateway": provider}, "autoupdate": False, "share": "disabled"})
    )
    Path("prices.txt").write_text(PRICES)
    command = ["opencode", "run", "--model", f"gateway/{MODEL}", TASK]
    done = subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert len(Path("bill.txt").read_text().splitlines()) == 2
    return done.stdout


if __name__ == "__main__":
    print(run(sys.argv[1]))
