"""A route forwards requests to one server, and only to the path that it was opened for."""

import asyncio
import os
from collections.abc import AsyncIterator

import httpx
import pytest

from rllm.errors import ConfigError
from rllm.sandbox.base import SandboxError
from rllm.sandbox.route import Route


@pytest.fixture
async def server() -> AsyncIterator[str]:
    """A server that answers with the received request, and keeps reading as if more requests could follow."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(
            next((line[16:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0)
        )
        body = head + await reader.readexactly(length)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def raw(url: str, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer


async def test_request_reaches_the_server_under_the_same_path(server: str) -> None:
    route = await Route.open(os.getpid(), f"{server}/sessions/7")
    async with httpx.AsyncClient() as client:
        answers = [await client.post(f"{route.url}/v1/chat/completions?x=1", content=b"hello") for _ in range(2)]
    await route.close()
    for answer in answers:
        assert answer.text.startswith("POST /sessions/7/v1/chat/completions?x=1 HTTP/1.1\r\n")
        assert answer.text.endswith("\r\n\r\nhello")
        assert f"Host: {server.removeprefix('http://')}" in answer.text


@pytest.mark.parametrize(
    "path",
    [
        "/admin",
        "/sessions/70/v1",
        "/sessions/7/../8",
        "/sessions/7/%2e%2e/8",
        "/sessions/7/..%2f8",
        "/",
        "//sessions/7",
    ],
)
async def test_other_paths_are_rejected(server: str, path: str) -> None:
    route = await Route.open(os.getpid(), f"{server}/sessions/7")
    answer = await raw(route.url, b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n" % path.encode())
    await route.close()
    assert answer.startswith(b"HTTP/1.1 403 ")


@pytest.mark.parametrize(
    "request_",
    [
        b"GET http://127.0.0.1/sessions/7 HTTP/1.1\r\n\r\n",
        b"CONNECT 127.0.0.1:80 HTTP/1.1\r\n\r\n",
        b"GET /sessions/7 HTTP/1.1\r\n folded: x\r\n\r\n",
        b"GET /sessions/7 HTTP/1.1\r\nA: x\nGET /admin HTTP/1.1\r\n\r\n",
        b"GET /sessions/7 HTTP/1.1\r\nno colon\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /sessions/7 HTTP/1.1\r\nA: " + b"x" * 70_000 + b"\r\n\r\n",
    ],
)
async def test_malformed_requests_are_rejected(server: str, request_: bytes) -> None:
    route = await Route.open(os.getpid(), f"{server}/sessions/7")
    answer = await raw(route.url, request_)
    await route.close()
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 431 "))


async def test_server_is_asked_to_close_after_one_request(server: str) -> None:
    route = await Route.open(os.getpid(), f"{server}/sessions/7")
    head = b"GET /sessions/7 HTTP/1.1\r\nConnection: keep-alive, upgrade\r\nUpgrade: h2c\r\nA: b\r\n\r\n"
    answer = await raw(route.url, head + b"GET /admin HTTP/1.1\r\n\r\n")
    await route.close()
    assert answer.count(b"HTTP/1.1 200") == 1
    assert b"Connection: close\r\nA: b" in answer
    assert b"upgrade" not in answer.lower()


async def test_invalid_urls_and_processes_are_rejected(server: str) -> None:
    for url in "https://127.0.0.1/", "127.0.0.1:80", "http:///x":
        with pytest.raises(ConfigError, match="route"):
            await Route.open(os.getpid(), url)
    with pytest.raises(SandboxError):
        await Route.open(2**22 + 1, server)


async def test_unreachable_server_is_reported(unused_tcp_port: int) -> None:
    route = await Route.open(os.getpid(), f"http://127.0.0.1:{unused_tcp_port}/")
    answer = await raw(route.url, b"GET / HTTP/1.1\r\n\r\n")
    await route.close()
    assert answer.startswith(b"HTTP/1.1 502 ")
