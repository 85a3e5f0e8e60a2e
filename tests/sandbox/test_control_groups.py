"""Control groups of both versions are found if this process may create some."""

from pathlib import Path

import pytest

from rllm.sandbox.control_groups import parents


@pytest.fixture
def process(tmp_path: Path) -> Path:
    """`/proc/PID` of a process, whose control groups are in the folder `groups` beside it."""
    folder = tmp_path / "process"
    folder.mkdir()
    return folder


def make_group(folder: Path, enabled: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "cgroup.procs").touch()
    (folder / "cgroup.subtree_control").write_text(enabled)
    return folder


def test_cgroup_v2_is_the_nearest_group_with_all_controllers(process: Path) -> None:
    top = make_group(process.parent / "groups", "cpu memory pids")
    slice_ = make_group(top / "user.slice", "cpu memory pids io")
    make_group(slice_ / "run.scope")
    (process / "mountinfo").write_text(f"30 23 0:26 / {top} rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n")
    (process / "cgroup").write_text("0::/user.slice/run.scope\n")
    assert parents(process) == dict.fromkeys(("cpu", "memory", "pids"), slice_)


def test_cgroup_v1_has_a_group_per_controller(process: Path) -> None:
    lines = ["40 31 0:37 / {} rw - cgroup cgroup rw,name=systemd"]
    for name in ("cpu,cpuacct", "memory", "pids"):
        make_group(process.parent / "groups" / name / "own")
        lines.append(f"32 31 0:29 / {process.parent}/groups/{name} rw,relatime - cgroup cgroup rw,{name}")
    (process / "mountinfo").write_text("\n".join(lines))
    (process / "cgroup").write_text("9:name=systemd:/\n4:memory:/own\n8:pids:/own\n1:cpu,cpuacct:/own\n0::/\n")
    groups = process.parent / "groups"
    assert parents(process) == {
        "memory": groups / "memory/own",
        "pids": groups / "pids/own",
        "cpu": groups / "cpu,cpuacct/own",
    }


def test_container_with_read_only_or_foreign_groups_has_none(process: Path) -> None:
    (process / "mountinfo").write_text(f"30 23 0:26 /docker/1 {process.parent}/groups ro - cgroup2 cgroup2 ro\n")
    (process / "cgroup").write_text("0::/../2\n")
    assert parents(process) == {}
    (process / "mountinfo").unlink()  # as on other systems
    parents.cache_clear()
    assert parents(process) == {}
