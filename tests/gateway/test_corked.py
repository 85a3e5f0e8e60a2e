"""Answers leave in as few writes as possible, and whole."""

import asyncio

import pytest

from rllm.gateway.corked import CorkedHTTP


class Socket(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self):
        super().__init__()
        self.writes, self.closed = [], False

    def write(self, data):
        self.writes.append(data)

    def is_closing(self):
        return self.closed

    def close(self):
        self.closed = True


@pytest.fixture
async def connection():
    from uvicorn import Config
    from uvicorn.server import ServerState

    async def app(scope, receive, send):
        pass

    config = Config(app)
    config.load()
    http, socket = CorkedHTTP(config, ServerState(), {}), Socket()
    http.connection_made(socket)
    yield http.transport, socket
    http.connection_lost(None)


async def test_what_is_written_at_once_is_one_write(connection):
    corked, socket = connection
    corked.write(b"head")
    corked.write(b"body")
    assert socket.writes == []
    await asyncio.sleep(0)
    corked.write(b"end")
    await asyncio.sleep(0)
    assert socket.writes == [b"headbody", b"end"]


async def test_closing_sends_what_was_written(connection):
    corked, socket = connection
    corked.write(b"last words")
    corked.close()
    await asyncio.sleep(0)
    assert (socket.writes, socket.closed) == ([b"last words"], True)


async def test_nothing_is_written_to_a_connection_that_was_lost(connection):
    corked, socket = connection
    corked.write(b"too late")
    socket.closed = True
    await asyncio.sleep(0)
    assert socket.writes == []
