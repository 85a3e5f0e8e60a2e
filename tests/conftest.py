"""Environment of every test, wherever the suite is started.

One thread for each process's tensors: tiny models gain nothing from more, and on a busy machine they lose a lot.
Properties are tried on the same few examples in each run, which may take as long as they like; `make test-fuzz` tries more,
`RLLM_EXAMPLES` of them.
Bytecode is kept in any environment: hundreds of processes are started, and each would compile rllm again.
One dummy certificate is trusted: a client reads all trusted ones, for longer than most tests take, and each test has
its own client.
The key that seals runs is kept in a folder of the tests' own.
Ctrl-C works: a shell that starts the suite in the background lets it, and all its children, ignore the signal.
"""

import asyncio
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["SSL_CERT_FILE"] = str(Path(__file__).with_name("certificate.pem"))
_HOME = tempfile.TemporaryDirectory(prefix="rllm-home-")
os.environ.setdefault("RLLM_HOME", _HOME.name)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
settings.register_profile(
    "repeatable",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=int(os.environ.get("RLLM_EXAMPLES", "6")),
)
settings.load_profile("repeatable")
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Freeze objects created by imports and collection, so that garbage collection never visits them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The `cache_dir` of tiny policies, which are made once for all processes, with tokenizers of little text."""
    folder = tmp_path_factory.getbasetemp()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rllm.testing.tiny_policy.TOKENIZER_SAMPLE", 100)
        yield (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "policies"


@pytest.fixture
def put_in_hub_cache(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Path], Path]:
    """`put_in_hub_cache(folder)`: copy a model into an empty cache of the hub, as `owner/name`; returns the copy."""
    cache = tmp_path_factory.mktemp("hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))

    def put(folder: Path) -> Path:
        (cache / "models--owner--name" / "refs").mkdir(parents=True)
        (cache / "models--owner--name" / "refs" / "main").write_text("abc")
        return shutil.copytree(folder, cache / "models--owner--name" / "snapshots" / "abc")

    return put


@pytest.fixture
def no_collection() -> Generator[None, None, None]:
    """Garbage collection is disabled: in a deep recursion no stack is left for finalizers of objects of other
    tests, and each error there is reported as a failure of this one."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
async def pass_time() -> AsyncIterator[Callable[[float], None]]:
    """Advance the event loop's clock by a number of seconds: expired deadlines take effect at once.

    So deadlines can be long enough for the slowest machine.
    """
    loop, passed = asyncio.get_running_loop(), 0.0
    time = loop.time

    def put_forward(seconds: float) -> None:
        nonlocal passed
        passed += seconds

    loop.time = lambda: time() + passed  # type: ignore[method-assign]
    yield put_forward
    loop.time = time  # type: ignore[method-assign]
