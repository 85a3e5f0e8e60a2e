"""Sandboxes of every backend that this machine has; `make test-sandbox` installs them."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator

import psutil
import pytest

from rllm.errors import ConfigError
from rllm.sandbox import Sandbox, SandboxBackend, SandboxLimits, open_backend
from rllm.sandbox.control_groups import left_groups
from rllm.sandbox.owner import this_process

DEBIAN = "localhost/debian-min"
"""Image with Python and git, made by tests/sandbox/install.py."""
IMAGES = {"local": "host", "podman": DEBIAN}
SMALL = SandboxLimits(memory_mb=256, disk_mb=64, max_processes=64)


def backend_or_skip(name: str) -> SandboxBackend:
    try:
        backend = open_backend(name)
        if name == "podman" and not _has_image():
            raise ConfigError(f"podman has no image {DEBIAN}: run python tests/sandbox/install.py")
    except ConfigError as error:
        if os.environ.get("RLLM_TEST_SANDBOXES") == "required":
            raise
        pytest.skip(str(error))
    return backend


def shells_of(owner: int) -> list[psutil.Process]:
    """Return the shells that will delete the remains of a process once it has ended."""
    shells = [(process, process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    return [process for process, line in shells if "rllm-sandboxes" in line and f":{owner}:" in line[-1]]


@functools.cache
def _has_image() -> bool:
    return subprocess.run(["podman", "image", "exists", DEBIAN]).returncode == 0


@pytest.fixture(params=list(IMAGES))
def backend(request) -> SandboxBackend:
    return backend_or_skip(request.param)


@pytest.fixture
def image(backend) -> str:
    """Return the name of an image with Python that the backend has."""
    return IMAGES[backend.name]


@pytest.fixture
async def sandbox(backend, image) -> AsyncIterator[Sandbox]:
    async with await backend.start(image, limits=SMALL) as sandbox:
        yield sandbox


@pytest.fixture(autouse=True)
def no_sandbox_is_left() -> Iterator[None]:
    yield
    assert not [group for group in left_groups() if this_process() in group.name]


@pytest.fixture(autouse=True, scope="session")
def no_container_is_left() -> Iterator[None]:
    yield
    if shutil.which("podman"):
        listing = ["podman", "ps", "--all", "--quiet", "--filter", f"label=rllm.owner={this_process()}"]
        assert not subprocess.run(listing, capture_output=True, text=True).stdout
