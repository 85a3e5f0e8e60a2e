"""Requests that offer to speak another protocol, and those of HTTP/1.0, byte for byte."""

import json
import socket
from contextlib import ExitStack

import pytest

from .conftest import start

CHAT = "/sessions/s/v1/chat/completions"
HI = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
JAVA = (
    "Connection: Upgrade, HTTP2-Settings",
    "Upgrade: h2c",
    "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
)


@pytest.fixture(scope="module")
def served():
    with ExitStack() as stack:
        yield start(stack)


def request(body, *headers, version="1.1", path=CHAT):
    content = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/{version}", "Host: h", f"Content-Length: {len(content)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + content


def said(served, *parts):
    """All that is answered until the connection is closed, which the last request asks for."""
    address = served.server.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1])), timeout=60) as client:
        for part in parts:
            client.sendall(part)
        return b"".join(iter(lambda: client.recv(65536), b""))


@pytest.mark.parametrize("cut", [None, 30, 200, 330])
def test_a_body_behind_an_offer_of_http2_is_read_as_if_there_were_none(served, cut):
    first, last = request(HI, *JAVA), request({**HI, "stream": True}, "Connection: close")
    answer = said(served, first[:cut], *([] if cut is None else [first[cut:]]), last)
    assert answer.count(b"HTTP/1.1 200 OK\r\n") == 2
    assert b'"content":"hello"' in answer
    assert answer.rstrip().endswith(b"0")
    assert b"[DONE]" in answer


def test_an_offer_on_a_connection_that_is_to_be_closed_is_read(served):
    answer = said(served, request(HI, JAVA[0] + ", close", *JAVA[1:]))
    assert b'"content":"hello"' in answer


def test_an_offer_in_chunks_between_other_requests_is_read(served):
    content = json.dumps(HI).encode()
    head = (
        request(HI, *JAVA)
        .split(b"\r\n\r\n")[0]
        .replace(b"Content-Length: %d" % len(content), b"Transfer-Encoding: chunked")
    )
    offer = b"%s\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (head, len(content), content)
    get = ("\r\n".join(["GET /healthz HTTP/1.1", "Host: h", *JAVA, "", ""])).encode()
    answer = said(served, request(HI) + offer + get + request(HI, "Connection: close"))
    assert answer.count(b"HTTP/1.1 200 OK\r\n") == 4
    assert answer.count(b'"content":"hello"') == 3


def test_a_websocket_is_still_told_that_there_are_none(served):
    get = f"GET {CHAT} HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n".encode()
    answer = said(served, get + request(HI, "Connection: close"))
    assert answer.startswith(b"HTTP/1.1 426 ")
    assert b'"content":"hello"' in answer


def test_a_connect_is_refused(served):
    tunnel = "\r\n".join(["CONNECT h:80 HTTP/1.1", "Host: h", *JAVA, "", ""]).encode()
    assert said(served, tunnel).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("headers", [(), ("Connection: keep-alive",), JAVA])
@pytest.mark.parametrize("stream", [False, True])
def test_http_1_0_has_no_chunks_and_ends_with_the_connection(served, stream, headers):
    head, _, body = said(served, request({**HI, "stream": stream}, *headers, version="1.0")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"connection: close" in head
    assert b"chunked" not in head
    if stream:
        assert body.startswith(b"data: {")
        assert body.endswith(b"data: [DONE]\n\n")
    else:
        assert json.loads(body)["choices"][0]["message"]["content"] == "hello"
