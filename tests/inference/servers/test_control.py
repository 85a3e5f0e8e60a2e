from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from rllm.errors import InferenceError
from rllm.inference.servers.control import VLLMControl

Serve = Callable[[bytes], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a server that answers its first request with these bytes, and disconnects."""
    sockets: list[socket.socket] = []

    def serve(expected: bytes) -> str:
        listening = socket.create_server(("127.0.0.1", 0))
        sockets.append(listening)

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(expected)

        threading.Thread(target=answer, daemon=True).start()
        return f"http://127.0.0.1:{listening.getsockname()[1]}/v1"

    yield serve
    for listening in sockets:
        listening.close()


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{", r"closed the connection.*\(IncompleteRead\)"),
        (b"nonsense\r\n\r\n", r"closed the connection.*\(BadStatusLine\)"),
        (b"HTTP/1.1 500 No\r\ncontent-length: 99\r\n\r\nwhy", "was answered with 500"),
    ],
)
def test_interrupted_answer_is_a_server_error(serve: Serve, expected: bytes, message: str) -> None:
    with pytest.raises(InferenceError, match=message) as failed:
        VLLMControl(serve(expected)).weight_version()
    assert failed.value.status_code in (500, 503)


def test_proxy_settings_are_ignored_for_the_server(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    url = serve(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert VLLMControl(url, api_key="sk-of-the-server").is_healthy()
