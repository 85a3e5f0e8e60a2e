"""Whether this machine, and a model, will do for training: looked at before anything is started."""

from __future__ import annotations

from pathlib import Path

from rllm.inference.servers.capabilities import Finding


def checkup(*, model: str | None, run_dir: Path, port: int) -> list[Finding]:
    """Everything that can be found out without training.

    Args:
        model: a folder or hub id, as `model.path`; `None` looks at the machine only.
        run_dir: where runs are to be written.
        port: where `rllm gateway` is to listen.
    """
    from rllm.trainer.checkup.machine import disk, gpus, memory, python, reachable_port
    from rllm.trainer.checkup.model import model_findings, training_bytes
    from rllm.trainer.checkup.versions import installed_packages, version_findings

    found = [python(), *version_findings(installed_packages())]
    needed = None if model is None else training_bytes(model)
    found += [gpus(), memory(needed), disk(run_dir, needed), reachable_port(port)]
    return found if model is None else [*found, *model_findings(model)]
