"""Clients that send too much, or too slowly, before their request can be read."""

import gzip
import json
import socket
import time
from contextlib import ExitStack, suppress
from http.client import HTTPResponse
from pathlib import Path

import pytest

from rllm.errors import ConfigError
from rllm.gateway.config import GatewayConfig

HEAD = b"POST /sessions/s/v1/%s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n"
BODY = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
WHOLE = BODY[:-1] + b', "input": "hi", "max_tokens": 5}'


def connect(served):
    host, port = served.server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def read_answer(connection):
    """Return the status and JSON of the answer after which the server closes, `None` if it closes without one."""
    received = b""
    while piece := connection.recv(65536):
        received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    if not head:
        return None
    return int(head.split()[1]), json.loads(body[body.index(b"{") :].split(b"\r\n")[0])


def num_open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def limited(serve, **limits):
    return serve(config=GatewayConfig(shutdown_timeout_s=1, **limits))


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"x-long: " + b"a" * 3000 + b"\r\n\r\n", id="too long"),
        pytest.param(b"x-endless: " + b"a" * 3000, id="without end"),
        pytest.param(b"a: b\r\n" * 40 + b"\r\n", id="too many"),
    ],
)
def test_oversized_head_is_rejected(serve, sent):
    served = limited(serve, max_header_bytes=2000, max_headers=30)
    with connect(served) as connection:
        connection.sendall(HEAD % (b"chat/completions", len(BODY)) + sent)
        status, body = read_answer(connection)
    assert (status, body["error"]["code"]) == (431, "headers_too_large")
    assert served.post().status_code == 200


@pytest.mark.parametrize("sent", [b"x-long: " + b"a" * 3000 + b"\r\n\r\n", b"x-endless: " + b"a" * 3000, b"x-slow: "])
def test_rejected_head_gets_the_error_format_of_its_dialect(serve, sent):
    served = limited(serve, max_header_bytes=2000, header_timeout_s=1)
    for call in (b"messages?beta=true", b"messages/count_tokens"):
        with connect(served) as connection:
            connection.sendall(HEAD % (call, len(BODY)) + sent)
            status, body = read_answer(connection)
        assert status in (408, 431)
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")


def test_long_body_does_not_count_as_head(serve):
    served = limited(serve, max_header_bytes=2000)
    body = {"model": "m", "messages": [{"role": "user", "content": "hi" * 10_000}]}
    assert served.post(json=body).status_code == 200
    assert served.post(json=body).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_client_that_does_not_read_is_disconnected(serve, stream):
    served = serve(["x" * 100_000], config=GatewayConfig(shutdown_timeout_s=1, unread_timeout_s=0.1))
    connections = served.server._server.server_state.connections
    body = BODY[:-1] + b', "logprobs": true, "stream": %s}' % json.dumps(stream).encode()
    with connect(served) as connection:
        connection.sendall(HEAD % (b"chat/completions", len(body)) + b"\r\n" + body)
        deadline = time.monotonic() + 60
        while connections or not served.store.sessions():
            assert time.monotonic() < deadline, "the gateway still waits for the client"
            time.sleep(0.01)
    [trace] = served.store.by_session("s")
    assert trace.finish_reason == ("abort" if stream else "stop")
    assert len(trace.response_ids) == len(trace.logprobs) > 0
    assert "rllm_gateway_requests_in_flight 0.0\n" in served.http.get("/metrics").text


@pytest.mark.parametrize("path", ["/sessions/s/v1/chat/completions", "/sessions/s/v1/messages", "/sessions"])
def test_compressed_body_is_rejected(serve, path):
    served = serve()
    compressed = gzip.compress(WHOLE)
    refused = served.http.post(path, content=compressed, headers={"content-encoding": "gzip"})
    assert refused.status_code == 415
    assert "content-encoding='gzip': send the request body as it is" in refused.json()["error"]["message"]
    assert served.http.post(path, content=b"{}", headers={"content-encoding": "identity"}).status_code != 415


@pytest.mark.parametrize("before", ["nothing", "an answer", "a request"])
def test_slow_head_is_rejected(serve, before):
    whole, begun = (HEAD % (b"chat/completions", len(BODY)) + end for end in (b"\r\n" + BODY, b""))
    with connect(limited(serve, header_timeout_s=1)) as connection:
        connection.sendall({"nothing": b"", "an answer": whole, "a request": whole + begun}[before])
        if before != "nothing":
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        if before != "a request":
            connection.sendall(begun)
        status, body = read_answer(connection)
    assert status == 408
    assert "within 1 s" in body["error"]["message"]


def test_client_that_drips_its_head_gets_no_more_time(serve):
    with connect(limited(serve, header_timeout_s=0.2)) as connection:
        connection.sendall(HEAD % (b"chat/completions", 10) + b"x-slow: ")
        with pytest.raises(ConnectionError):
            drip(connection)


def drip(connection):
    while True:
        connection.sendall(b"a")
        time.sleep(0.01)


def test_silent_client_is_disconnected(serve):
    with connect(limited(serve, header_timeout_s=0.1)) as connection, suppress(ConnectionResetError):
        assert read_answer(connection) is None


@pytest.mark.parametrize(
    ("route", "kind_of"),
    [
        (b"chat/completions", lambda body: body["error"]["type"]),
        (b"responses", lambda body: body["error"]["type"]),
        (b"messages", lambda body: body["error"]["type"]),
    ],
)
def test_slow_body_is_rejected_in_the_error_format_of_its_dialect(serve, route, kind_of):
    served = limited(serve, body_timeout_s=0.1)
    with connect(served) as connection:
        connection.sendall(HEAD % (route, len(BODY)) + b"\r\n" + BODY[:20])
        status, body = read_answer(connection)
    assert status == 408
    assert kind_of(body) == "invalid_request_error"
    assert ["did not arrive" in trace.error for trace in served.store.by_session("s")] == [True]
    with connect(served) as connection:
        connection.sendall(HEAD % (route, len(WHOLE)) + b"connection: close\r\n\r\n" + WHOLE)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")


def test_slow_body_of_another_route_is_rejected(serve):
    with connect(limited(serve, body_timeout_s=0.1)) as connection:
        connection.sendall(b"POST /sessions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        assert read_answer(connection)[0] == 408


def test_long_body_of_another_route_is_rejected(serve):
    served = limited(serve, max_body_bytes=1000)
    answer = served.http.post("/sessions", content=b"[" * 1001)
    assert answer.status_code == 413
    assert served.http.post("/sessions", json={"id": "s"}).status_code == 200


def test_slow_client_within_the_limits_is_served_repeatedly(serve):
    served = limited(serve, header_timeout_s=60, body_timeout_s=60)
    with connect(served) as connection:
        for _ in range(2):
            whole = HEAD % (b"chat/completions", len(BODY)) + b"\r\n" + BODY
            for start in range(0, len(whole), 16):
                connection.sendall(whole[start : start + 16])
                time.sleep(0.001)
            with HTTPResponse(connection) as answer:  # the head and the body may arrive separately
                answer.begin()
                assert (answer.status, bool(answer.read())) == (200, True)


def test_many_slow_clients_do_not_block_others_and_leak_nothing(serve):
    served = limited(serve, header_timeout_s=1, body_timeout_s=1)
    served.post()
    before = num_open_files()
    heads = [b"POST /v1/chat/completions HTTP/1.1\r\nx", HEAD % (b"messages", 99) + b"\r\n{"]
    with ExitStack() as stack:
        connections = []
        for number in range(60):
            connections.append(stack.enter_context(connect(served)))
            connections[-1].sendall(heads[number % 2])
        assert served.post().status_code == 200
        assert [read_answer(connection)[0] for connection in connections] == [408] * 60
    deadline = time.monotonic() + 60
    while num_open_files() > before:  # the server closes its ends soon
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert served.post().status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        pytest.param("/v1/messages", marks=pytest.mark.slow),
        pytest.param("/sessions", marks=pytest.mark.slow),
    ],
)
def test_oversized_body_is_rejected_and_the_next_call_is_answered(serve, path):
    served = serve()
    answer = served.http.post(path, content=bytes(64 * 1024 * 1024 + 1))
    assert answer.status_code == 413
    assert "67,108,864 bytes" in answer.json()["error"]["message"]
    assert served.post().status_code == 200


@pytest.mark.parametrize("content", [bytes(1_000_000), [bytes(10_000)] * 100], ids=["whole", "in chunks"])
def test_body_of_many_times_the_limit_is_rejected(serve, content):
    served = limited(serve, max_body_bytes=1000, max_header_bytes=2000)
    assert served.http.post("/v1/chat/completions", content=content).status_code == 413
    assert served.post().status_code == 200


@pytest.mark.parametrize("endless", [b"a: b\r\n", b"a" * 100])
def test_endless_data_after_a_chunked_body_is_cut_off(serve, endless):
    served = limited(serve, max_body_bytes=1000, max_header_bytes=2000)
    head = b"POST /sessions/s/v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    with connect(served) as connection:
        connection.sendall(head + b"%x\r\n%s\r\n0\r\nx-end: " % (len(BODY), BODY))
        with pytest.raises(ConnectionError):
            connection.sendall(endless * 1_000_000)
    assert served.post().status_code == 200


def test_body_is_not_read_without_a_key(serve):
    with connect(serve(config=GatewayConfig(api_key="secret", shutdown_timeout_s=1))) as connection:
        connection.sendall(HEAD % (b"chat/completions", 10**9) + b"connection: close\r\n\r\n")
        assert read_answer(connection)[0] == 401


@pytest.mark.parametrize("name", ["max_header_bytes", "max_headers", "header_timeout_s", "body_timeout_s"])
def test_limits_must_be_positive(name):
    with pytest.raises(ConfigError, match=f"{name}=0"):
        GatewayConfig(**{name: 0})


JAVA = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAA\r\n\r\n"


def test_http2_upgrade_offer_does_not_lose_the_body(serve):
    """Java's HttpClient offers HTTP/2 with its first request on each connection."""
    head = HEAD % (b"chat/completions", len(BODY))
    with connect(serve()) as connection:
        connection.sendall(head + JAVA + BODY)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.sendall(head + b"connection: close\r\n\r\n" + BODY)
        assert read_answer(connection)[0] == 200


def test_websockets_are_rejected(serve):
    with connect(serve()) as connection:
        connection.sendall(
            b"GET /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\r\n"
        )
        assert connection.recv(65536).startswith(b"HTTP/1.1 426")


def test_connect_is_rejected(serve):
    with connect(serve()) as connection:
        connection.sendall(b"CONNECT h:80 HTTP/1.1\r\nhost: h\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 400")
