"""Main memory is what the machine has, within the limits of control groups."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from rllm._runtime.process import free_memory, total_memory

MIB = 2**20


def system(root: Path, cgroup: str, groups: dict[str, dict[str, str]]) -> Path:
    """Write the files of a system that has 4 GiB free."""
    files = {"proc/meminfo": "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n", "proc/self/cgroup": cgroup}
    for folder, values in groups.items():
        files |= {f"sys/fs/cgroup/{folder}/{name}": text for name, text in values.items()}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def second(limit: str, used: int, cached: int = 0) -> dict[str, str]:
    return {"memory.max": limit, "memory.current": f"{used}\n", "memory.stat": f"anon 1\ninactive_file {cached}\n"}


def test_this_machine_has_memory() -> None:
    assert 0 < (free_memory() or 1) <= total_memory()


def test_container_has_the_remainder_of_its_limit(tmp_path: Path) -> None:
    root = system(tmp_path, "0::/\n", {".": second(f"{512 * MIB}\n", 200 * MIB, cached=50 * MIB)})
    assert total_memory(root) == 512 * MIB
    assert free_memory(root) == 362 * MIB  # 512 - (200 - 50): cached files can be evicted


def test_tightest_limit_of_nested_groups_counts(tmp_path: Path) -> None:
    groups = {"jobs": second(f"{300 * MIB}", 100 * MIB), "jobs/mine": second("max\n", 0)}
    root = system(tmp_path, "0::/jobs/mine\n", groups)
    assert (total_memory(root), free_memory(root)) == (300 * MIB, 200 * MIB)


def test_cgroup_v1_is_supported(tmp_path: Path) -> None:
    limits = {"memory.limit_in_bytes": f"{256 * MIB}", "memory.usage_in_bytes": f"{300 * MIB}"}
    root = system(tmp_path, "4:cpu,memory:/job\n1:cpuset:/\n0::/\n", {"memory/job": limits})
    assert total_memory(root) == 256 * MIB
    assert free_memory(root) == 0


@pytest.mark.parametrize("cgroup", ["", "0::/\n", "0::/gone\n"])
def test_memory_of_the_machine_counts_without_a_limit(cgroup: str, tmp_path: Path) -> None:
    root = system(tmp_path, cgroup, {".": second("max\n", 0)})
    assert free_memory(root) == 4096 * MIB
    assert total_memory(root) == total_memory(tmp_path / "no system")


def test_unknown_memory_is_none(tmp_path: Path) -> None:
    assert free_memory(tmp_path) is None


USES_TWICE = """
import resource
from rllm._runtime.process import keep_freed_memory

keep_freed_memory()
bytearray(2**26)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
bytearray(2**26)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_is_reused() -> None:
    done = subprocess.run([sys.executable, "-c", USES_TWICE], capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) < 2**26 // resource.getpagesize() // 10  # without the setting, a page fault for each page


@pytest.mark.skipif(sys.platform != "linux", reason="other systems report only ru_maxrss")
def test_peak_does_not_count_the_program_that_started_this_one() -> None:
    held = b"x" * (300 * MIB)
    code = "from rllm._runtime.process import peak_memory; print(peak_memory())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 2 * MIB < int(done.stdout) < len(held)
