from __future__ import annotations

import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from rllm._runtime.ids import new_id


def test_ids_are_unique_across_threads_and_seeds() -> None:
    random.seed(0)
    with ThreadPoolExecutor(4) as threads:
        ids = list(threads.map(lambda _: new_id(), range(4_000)))
    random.seed(0)
    assert len({*ids, new_id()}) == 4_001
    assert all(len(item) == 32 for item in ids)


def test_forked_child_makes_its_own_ids() -> None:
    code = """
import os
from rllm._runtime.ids import new_id
read, write = os.pipe()
if os.fork() == 0:
    os.write(write, new_id().encode())
    os._exit(0)
print(new_id() != os.read(read, 32).decode())
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout == "True\n"
