"""The fast suite in several processes, forked from one that has imported what most tests need.

Usage: `python tests/side_by_side.py`, perhaps with options of pytest. Importing torch, transformers and the clients of
model servers takes a process about ten seconds. The longest parts begin first, so that all processes end at about the
same time.
"""

import gc
import logging
import os
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

import hypothesis
import hypothesis.strategies
import pytest
from hypothesis.configuration import notice_initialization_restarted

NUM_PROCESSES = 4
"""More than two cores can run: a test often waits."""
IMPORTS = (
    "anthropic openai mcp google.genai starlette aiohttp sympy peft transformers.modeling_utils "
    "langgraph.graph langchain_openai rllm.cli rllm.trainer.agent_trainer rllm.testing.tiny_policy"
)
PARTS = [
    "trainer", "gateway", "backends", "sdk engine tools", "cli", "inference", "compat data viewer sandbox algorithms",
    "parser", "security store", "rewards", "frameworks testing",
]  # fmt: skip
"""Folders of tests; all others are the last part."""
NOT_HERE = ["test_language.py"]
"""Tests of `make check`."""
PLUGINS = "--disable-plugin-autoload -p pytest_asyncio.plugin -p _hypothesis_pytestplugin"
TESTS = Path(__file__).parent


def parts() -> dict[str, list[Path]]:
    """Return the paths of each part, by its name."""
    named = {part: [TESTS / name for name in part.split()] for part in PARTS}
    known = {TESTS / name for name in NOT_HERE}.union(*named.values())
    return named | {"others": sorted({*TESTS.glob("[a-z]*/"), *TESTS.glob("test_*.py")} - known)}


def start(paths: list[Path], log: Path) -> int:
    """Start the tests in a process of their own; return its id."""
    if process := os.fork():
        return process
    with log.open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.environ["PYTEST_XDIST_WORKER"] = f"gw{log.stem}"
    code = pytest.main([*PLUGINS.split(), f"--basetemp={log.with_suffix('')}", *sys.argv[1:], *map(str, paths)])
    sys.stdout.flush()
    os._exit(code)


@hypothesis.settings(database=None)
@hypothesis.given(hypothesis.strategies.text())
def prepare_hypothesis(_: str) -> None:
    """Let hypothesis read the constants of all modules and the table of all characters, once for all processes."""


def main() -> int:
    """Run all parts, and print the output of each when it ends; return 1 if one failed."""
    del sys.path[0]  # this folder, whose subfolders have the names of packages
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in IMPORTS.split():
        import_module(name)
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True  # pytest would add handlers to each, six times a test
    prepare_hypothesis()
    notice_initialization_restarted(warn=False)  # the plugin of hypothesis would report the early import
    gc.freeze()
    waiting, running, failed = list(parts().items()), {}, False
    with tempfile.TemporaryDirectory(prefix="rllm-tests-") as folder:
        while waiting or running:
            if waiting and len(running) < NUM_PROCESSES:
                name, paths = waiting.pop(0)
                log = Path(folder, f"{len(waiting)}.log")
                running[start(paths, log)] = name, log, time.monotonic()
                continue
            process, status = os.wait()
            name, log, begin = running.pop(process)
            failed |= os.waitstatus_to_exitcode(status) not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
            print(f"== {name}: {time.monotonic() - begin:.0f} s\n{log.read_text()}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
