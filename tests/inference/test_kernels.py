from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from rllm.inference.local.packed import multiplies_bfloat16

PROGRAM = """
import os, torch
from rllm.inference.local.kernels import keep_few_kernels
keep_few_kernels()
assert ("LRU_CACHE_CAPACITY" in os.environ) is ({given!r} is not None)
for _ in range(2):
    for rows in range(1, 161):
        torch.mm(torch.ones(rows, 64, dtype=torch.bfloat16), torch.ones(64, 64, dtype=torch.bfloat16))
"""


def programs_made(given: str | None) -> int:
    names = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    own = {name: value for name, value in os.environ.items() if name not in names}
    own |= {"ONEDNN_VERBOSE": "2"} | ({} if given is None else dict.fromkeys(names, given))
    program = PROGRAM.format(given=given)
    done = subprocess.run([sys.executable, "-c", program], env=own, capture_output=True, text=True, check=True)
    return sum("create:cache_miss" in line and "matmul" in line for line in done.stdout.splitlines())


@pytest.mark.skipif(not multiplies_bfloat16(), reason="oneDNN has no products in bfloat16 here")
def test_programs_for_shapes_that_are_long_past_are_given_up_unless_the_environment_says_otherwise() -> None:
    once = programs_made("1024")
    assert 130 < once <= 161, "for each shape one"
    assert programs_made(None) > 1.9 * once, "and again, where all others came between"


GROWTH = """
import torch
from pathlib import Path
from rllm.inference.local.kernels import keep_few_kernels
keep_few_kernels()
torch.set_num_threads(1)
inputs, weight = torch.ones(1100, 256), torch.ones(256, 256)
for rows in range(100, 1100):
    torch.ops.mkldnn._linear_pointwise(inputs[:rows], weight, None, "none", [], "")
    if rows in (300, 1099):
        print(Path("/proc/self/statm").read_text().split()[1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
@pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this torch has no oneDNN")
def test_memory_does_not_grow_with_the_shapes_of_linear_layers() -> None:
    done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True)
    before, after = (int(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20 for pages in done.stdout.split())
    assert after - before < 250, "MB for 800 more shapes, of which each takes 0.7"
