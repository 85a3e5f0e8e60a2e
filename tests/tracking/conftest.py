"""trackio chooses its folder when it is imported."""

import os
import tempfile

import pytest

_folder = tempfile.TemporaryDirectory(prefix="trackio-")
os.environ["TRACKIO_DIR"] = _folder.name


@pytest.fixture(scope="session", autouse=True)
def _no_trackio_folder_is_left():
    yield
    _folder.cleanup()
