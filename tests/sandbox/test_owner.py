import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rllm.sandbox.owner import has_ended, this_process

from ..waiting import wait_for
from .conftest import shells_of


def test_process_has_ended_if_its_id_or_start_time_is_gone():
    program = "from rllm.sandbox.owner import this_process; print(this_process(), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1, text=True) as process:
        owner = process.stdout.readline().strip()
        assert not has_ended(owner)
        process.communicate("\n")
    assert has_ended(owner)
    assert not has_ended(this_process())


def test_processes_of_other_machines_and_containers_are_left_alone():
    machine, boot, namespace, pid, start = this_process().split(":")
    assert has_ended(f"{machine}:{boot}:{namespace}:{pid}:7")  # its id has been reused
    assert has_ended(f"{machine}:another:{namespace}:{pid}:{start}")  # before the machine started
    assert not has_ended(f"another:{boot}:{namespace}:{pid}:7")
    assert not has_ended(f"{machine}:{boot}:7:{pid}:7")
    assert not has_ended("nonsense")


FOLDER = "from rllm.sandbox.owner import own_folder; (own_folder() / 'file').touch(); print(own_folder(), flush=True); input()"


@pytest.mark.slow
@pytest.mark.parametrize("with_shell", [False, True], ids=["alone", "with all its processes"])
def test_temporary_files_are_deleted_after_kill_9(tmp_path, with_shell):
    """At once by a shell, or else by the next process."""
    start = {"args": [sys.executable, "-c", FOLDER], "env": {**os.environ, "TMPDIR": str(tmp_path)}, "text": True}
    with subprocess.Popen(**start, stdin=-1, stdout=-1) as process:
        folder = Path(process.stdout.readline().strip())
        assert folder.parent == tmp_path
        assert not psutil.Process(process.pid).children(), "Ray would kill a child at the end of its process"
        wait_for(lambda: len(shells_of(process.pid)) == 1)  # its child becomes `cat`
        killed = shells_of(process.pid) if with_shell else []
        for each in (*killed, process):
            each.kill()
    if with_shell:
        assert len(killed) == 1
        assert (folder / "file").exists()
        assert subprocess.run(**start, input="\n", stdout=-1).returncode == 0
    wait_for(lambda: not list(tmp_path.iterdir()))
