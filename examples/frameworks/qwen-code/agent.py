"""Qwen Code on a small task with files: `python agent.py chat` (or one of `WAYS`), in an empty folder that is its home.

It takes OPENAI_BASE_URL or ANTHROPIC_BASE_URL, and the matching key, from the environment; nothing here depends on rllm.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

MODEL = os.environ.get("OPENAI_MODEL", "policy")
TASK = "prices.txt has prices. Add the lines of crème brûlée and of café au lait to bill.txt, and say what they cost together."
PRICES = "42.85 euro for crème brûlée in a box\n6.20 euro for café au lait in a cup\n9.10 euro for a tarte tatin\n"
SETTINGS = {"privacy": {"usageStatisticsEnabled": False}}


def qwen(login: str, *options: str) -> str:
    """Run Qwen Code, and return its answer once it has written the bill."""
    Path("prices.txt").write_text(PRICES)
    Path(".qwen").mkdir()
    Path(".qwen/settings.json").write_text(json.dumps(SETTINGS))
    command = ["qwen", "--auth-type", login, "--model", MODEL, "--approval-mode", "yolo", *options, "--prompt", TASK]
    done = subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    bill = Path("bill.txt").read_text().splitlines()
    assert len(bill) == 2, (bill, done.stdout)
    return done.stdout


WAYS = {
    "chat": lambda: qwen("openai"),
    "messages": lambda: qwen("anthropic"),
    "short": lambda: qwen(
        "openai",
        "--system-prompt",
        "You do what is asked, by commands of the shell.",
        "--core-tools",
        "run_shell_command",
    ),
}

if __name__ == "__main__":
    print(WAYS[sys.argv[1]]())
