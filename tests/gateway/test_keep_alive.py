import asyncio

from rllm.gateway.http_limits import keep_alive


class Client:
    def __init__(self):
        self.sent = []
        self.received_twice = asyncio.Event()

    async def send(self, piece):
        self.sent.append(piece)
        if len(self.sent) == 2:
            self.received_twice.set()


async def test_keep_alives_are_sent_until_the_stream_ends():
    client = Client()
    with keep_alive(client.send, b"~", 0.01):
        await asyncio.wait_for(client.received_twice.wait(), timeout=60)
    num_sent = len(client.sent)
    await asyncio.sleep(0.05)
    assert len(client.sent) == num_sent


async def test_keep_alive_is_sent_once_per_interval(pass_time):
    client = Client()
    with keep_alive(client.send, b"~", 60.0):
        for num_intervals in (1, 2):
            pass_time(61.0)
            for _ in range(10):
                await asyncio.sleep(0)
            assert client.sent == num_intervals * [b"~"]


async def test_stream_with_regular_events_gets_no_keep_alives():
    client = Client()
    with keep_alive(client.send, b"~", 60.0) as spoken:
        for _ in range(5):
            spoken()
            await asyncio.sleep(0.001)
    assert client.sent == []
