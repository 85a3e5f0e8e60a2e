import subprocess
import sys

from rllm.sandbox.owner import has_ended, this_process


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
    assert has_ended(f"{machine}:{boot}:{namespace}:{pid}:7")  # its id was used again
    assert has_ended(f"{machine}:another:{namespace}:{pid}:{start}")  # before the machine started
    assert not has_ended(f"another:{boot}:{namespace}:{pid}:7")
    assert not has_ended(f"{machine}:{boot}:7:{pid}:7")
    assert not has_ended("nonsense")
