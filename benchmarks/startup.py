"""Time of `import rllm.sdk` and `rllm --help` beyond the interpreter and `openai`.

    python benchmarks/startup.py [--runs 7] [--json]

Every program runs in a fresh interpreter, in turn, so that a noisy machine affects all equally; the fastest run
counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

PROGRAMS = {
    "python": ["-c", "pass"],
    "openai": ["-c", "import openai"],
    "sdk": ["-c", "import rllm.sdk"],
    "sdk_and_openai": ["-c", "import openai; from rllm.sdk import get_chat_client, session, trajectory"],
    "help": ["-m", "rllm", "--help"],
}
TARGETS_S = {"sdk_beyond_openai_s": 0.3, "help_beyond_python_s": 0.5}


def seconds_of(arguments: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def measure(runs: int) -> dict[str, float]:
    rounds = [{name: seconds_of(arguments) for name, arguments in PROGRAMS.items()} for _ in range(runs + 1)]
    best = {name: min(times[name] for times in rounds[1:]) for name in PROGRAMS}  # the first round compiles bytecode
    return {
        **{f"{name}_s": seconds for name, seconds in best.items()},
        "sdk_beyond_python_s": best["sdk"] - best["python"],
        "sdk_beyond_openai_s": best["sdk_and_openai"] - best["openai"],
        "help_beyond_python_s": best["help"] - best["python"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    measured = measure(options.runs)
    if options.json:
        print(json.dumps({name: round(seconds, 4) for name, seconds in measured.items()}))
        return
    for name, seconds in measured.items():
        target = TARGETS_S.get(name)
        note = f"  {seconds / target:5.0%} of the target of {target} s" if target else ""
        print(f"{name:22} {seconds:7.3f} s{note}")


if __name__ == "__main__":
    main()
