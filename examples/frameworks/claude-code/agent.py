"""Claude Code on a small task with files: `python agent.py print` (or one of `WAYS`), in an empty folder that is its home.

It takes ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY from the environment; nothing here depends on rllm.
"""

import os
import subprocess
import sys
from pathlib import Path

MODEL = os.environ.get("ANTHROPIC_MODEL", "policy")
TASK = "prices.txt has prices. Add the lines of crème brûlée and of café au lait to bill.txt, and say what they cost together."
PRICES = "42.85 euro for crème brûlée in a box\n6.20 euro for café au lait in a cup\n9.10 euro for a tarte tatin\n"


def claude(*options: str) -> str:
    """Run Claude Code, and return its answer once it has written the bill."""
    Path("prices.txt").write_text(PRICES)
    command = ["claude", "--print", TASK, "--model", MODEL, "--allowedTools", "Bash", *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert len(Path("bill.txt").read_text().splitlines()) == 2
    return done.stdout


WAYS = {
    "print": claude,
    "short": lambda: claude("--system-prompt", "You do what is asked, by commands of the shell.", "--tools", "Bash"),
}

if __name__ == "__main__":
    print(WAYS[sys.argv[1]]())
