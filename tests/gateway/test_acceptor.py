"""Everybody who waits at the door is let in at once."""

import asyncio
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest
import uvloop

from rllm.gateway.acceptor import Acceptor

NUM_CLIENTS = 40


class Greeter(asyncio.Protocol):
    def connection_made(self, transport):
        transport.write(b"hello")
        transport.close()


def clients_of(stack, listener, count):
    return [stack.enter_context(socket.create_connection(listener.getsockname())) for _ in range(count)]


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_all_who_wait_are_let_in_between_two_rounds_of_the_event_loop(factory):
    async def main():
        with ExitStack() as stack:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=NUM_CLIENTS))
            clients = clients_of(stack, listener, NUM_CLIENTS)
            acceptor = Acceptor(listener, Greeter)
            while not acceptor._connecting:  # noqa: ASYNC110
                await asyncio.sleep(0)
            assert len(acceptor._connecting) == NUM_CLIENTS
            acceptor.close()
            await acceptor.wait_closed()
            for client in clients:
                assert await asyncio.to_thread(client.recv, 9) == b"hello"

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(asyncio.wait_for(main(), 60))


WITHOUT_FILES = """
import asyncio, logging, resource, socket
from rllm.gateway import acceptor

class Greeter(asyncio.Protocol):
    def connection_made(self, transport):
        transport.write(b"hello")

async def main():
    acceptor._PAUSE_S = 0.01
    refused = asyncio.Event()
    acceptor.logger.addFilter(lambda record: refused.set() or True)
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, allowed[1]))
    acceptor.Acceptor(listener, Greeter)
    await refused.wait()
    resource.setrlimit(resource.RLIMIT_NOFILE, allowed)
    print((await asyncio.to_thread(client.recv, 9)).decode())

asyncio.run(main())
"""


def test_a_system_that_gives_no_more_files_is_asked_again():
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_FILES], capture_output=True, text=True, timeout=120, check=True
    )
    assert ended.stdout == "hello\n"
    assert "no connection can be accepted" in ended.stderr
