"""Codex on a small task with files: `python agent.py exec`, in an empty folder that is its home.

It reads no variable for its model's URL, so a config.toml names a provider; nothing here depends on rllm.
"""

import os
import subprocess
import sys
from pathlib import Path

MODEL = os.environ.get("OPENAI_MODEL", "policy")
TASK = "prices.txt has prices. Add the lines of crème brûlée and of café au lait to bill.txt, and say what they cost together."
PRICES = "42.85 euro for crème brûlée in a box\n6.20 euro for café au lait in a cup\n9.10 euro for a tarte tatin\n"
CONFIG = """\
model = "{model}"
model_provider = "gateway"

[model_providers.gateway]
name = "gateway"
base_url = "{url}"
env_key = "OPENAI_API_KEY"
"""


def execute() -> str:
    """Run Codex, and return its answer once it has written the bill."""
    home = Path(".codex").absolute()
    home.mkdir()
    (home / "config.toml").write_text(CONFIG.format(model=MODEL, url=os.environ["OPENAI_BASE_URL"]))
    Path("prices.txt").write_text(PRICES)
    command = ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env={**os.environ, "CODEX_HOME": str(home)}
    )
    assert len(Path("bill.txt").read_text().splitlines()) == 2
    return done.stdout


WAYS = {"exec": execute}

if __name__ == "__main__":
    print(WAYS[sys.argv[1]]())
