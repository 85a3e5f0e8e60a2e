"""Forwarding over HTTP, to servers with every behaviour of sockets."""

import asyncio
import contextlib
import ssl

import pytest
import trustme

from rllm.errors import ConfigError
from rllm.gateway.errors import UpstreamError
from rllm.gateway.upstream import HTTPUpstream, UpstreamCall
from rllm.gateway.upstream.http import normalized_base_url

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
REQUEST = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
ANSWER = b'{"choices":[{"index":0}]}'
FRAMED = HEAD + b"content-length: %d\r\n\r\n%s" % (len(ANSWER), ANSWER)


class Server:
    """Server that answers the k-th request with the k-th list of pieces; `None` breaks the connection off."""

    def __init__(self, *answers, pause_s=0.0):
        self.answers = list(answers)
        self.pause_s = pause_s
        self.requests = []
        self.num_connections = 0
        self._serving = []

    def _accept(self, reader, writer):
        self.num_connections += 1
        self._serving.append(asyncio.create_task(self._serve(reader, writer)))

    async def _serve(self, reader, writer):
        with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                for piece in self.answers.pop(0):
                    if piece is None:
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(self.pause_s)

    @contextlib.asynccontextmanager
    async def upstream(self, certificate=None, **options):
        scheme = "https" if certificate else "http"
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=certificate)
        upstream = HTTPUpstream(f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}", **options)
        try:
            yield upstream
        finally:
            await upstream.close()
            server.close()
            for task in self._serving:
                task.cancel()
            await asyncio.gather(*self._serving, return_exceptions=True)


async def complete(upstream):
    return await upstream.complete(UpstreamCall(id="chatcmpl-abc", request=REQUEST))


async def test_headers_of_the_call_are_forwarded_and_do_not_replace_ours():
    server = Server([FRAMED])
    headers = {"traceparent": "00-1-2-01", "content-type": "text/plain"}
    async with server.upstream() as upstream:
        await upstream.complete(UpstreamCall(id="c", request=REQUEST, headers=headers))
    head = server.requests[0].partition(b"\r\n\r\n")[0].split(b"\r\n")
    assert b"traceparent: 00-1-2-01" in head
    assert [line for line in head if line.startswith(b"content-type")] == [b"content-type: application/json"]


async def test_connections_are_reused_and_the_call_is_identified():
    server = Server([FRAMED], [FRAMED])
    async with server.upstream(api_key="key") as upstream:
        assert await complete(upstream) == {"choices": [{"index": 0}]}
        await complete(upstream)
    assert server.num_connections == 1
    assert server.requests[0].startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
    assert b"x-request-id: abc\r\n" in server.requests[0]
    assert b"authorization: Bearer key\r\n" in server.requests[0]


@pytest.mark.parametrize(
    "pieces",
    [
        [FRAMED[:20], FRAMED[20:70], FRAMED[70:]],
        [HEAD + b"transfer-encoding: chunked\r\n\r\n", b"%x\r\n%s\r\n0\r\n\r\n" % (len(ANSWER), ANSWER)],
        [HEAD + b"connection: close\r\n\r\n" + ANSWER, None],
        [b"HTTP/1.1 100 Continue\r\n\r\n", FRAMED],
    ],
    ids=["in pieces", "chunked", "until the end of the connection", "after an interim answer"],
)
async def test_all_framings_of_an_answer_are_parsed(pieces):
    async with Server(pieces, pause_s=0.01).upstream() as upstream:
        assert await complete(upstream) == {"choices": [{"index": 0}]}


async def test_idle_connection_closed_by_the_server_is_replaced():
    server = Server([FRAMED, None], [FRAMED])
    async with server.upstream() as upstream:
        await complete(upstream)
        await asyncio.sleep(0.05)
        await complete(upstream)
    assert server.num_connections == 2


async def test_request_is_repeated_once_if_a_reused_connection_breaks():
    server = Server([FRAMED], [None], [FRAMED])
    async with server.upstream() as upstream:
        await complete(upstream)
        await complete(upstream)
    assert (len(server.requests), server.num_connections) == (3, 2)


@pytest.mark.parametrize("answers", [[[FRAMED], [None], [None]], [[None]]], ids=["kept", "new"])
async def test_request_is_not_repeated_if_a_new_connection_breaks(answers):
    server = Server(*answers, [FRAMED])
    async with server.upstream() as upstream:
        for _ in answers[1:2]:
            await complete(upstream)
        with pytest.raises(UpstreamError, match="broke off") as lost:
            await complete(upstream)
    assert lost.value.fault == "broke_off"
    assert len(server.requests) == len(answers)


async def test_interrupted_answer_is_not_requested_again():
    server = Server([FRAMED[:-5], None], [FRAMED])
    async with server.upstream() as upstream:
        with pytest.raises(UpstreamError, match="broke off"):
            await complete(upstream)
    assert len(server.requests) == 1


@pytest.mark.parametrize("deadline", ["read_timeout_s", "total_timeout_s"])
async def test_silent_server_meets_a_deadline(deadline):
    async with Server([FRAMED[:30], FRAMED[30:]], pause_s=600).upstream(**{deadline: 0.1}) as upstream:
        with pytest.raises(UpstreamError, match="in time") as late:
            await complete(upstream)
    assert late.value.status_code == 504


async def test_server_without_http_is_reported():
    async with Server([b"SSH-2.0-OpenSSH\r\n"], [b"SSH-2.0-OpenSSH\r\n"]).upstream() as upstream:
        with pytest.raises(UpstreamError, match="does not speak HTTP"):
            await complete(upstream)


async def test_server_that_switches_protocol_is_reported():
    switching = b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
    async with Server([switching], [switching]).upstream() as upstream:
        with pytest.raises(UpstreamError, match="another protocol"):
            await complete(upstream)


async def test_media_types_and_codings_are_case_insensitive():
    head = b"HTTP/1.1 200 OK\r\ncontent-type: Text/Event-Stream\r\ntransfer-encoding: Chunked\r\n\r\n"
    call = UpstreamCall(id="c", request={**REQUEST, "stream": True})
    chunk = b'f\r\ndata: {"a":1}\n\n\r\n'
    async with Server([head + chunk + b"0\r\n\r\n"], [head + chunk, None]).upstream() as upstream:
        assert [batch async for batch in upstream.stream(call)] == [[{"a": 1}]]
        with pytest.raises(UpstreamError, match="closed the connection"):
            [batch async for batch in upstream.stream(call)]


TOO_LARGE = (
    b"{\"error\":{\"message\":\"'max_tokens' or 'max_completion_tokens' is too large: 48000. This model's maximum context length "
    b'is 2048 tokens and your request has 20 input tokens.","type":"BadRequestError","param":"max_tokens","code":400}}'
)
REFUSED = b"HTTP/1.1 400 Bad Request\r\ncontent-length: %d\r\n\r\n%s" % (len(TOO_LARGE), TOO_LARGE)


async def test_overlong_answer_is_shortened_to_the_limit():
    server = Server([REFUSED], [FRAMED])
    async with server.upstream() as upstream:
        answer = await upstream.complete(UpstreamCall(id="c", request={**REQUEST, "max_tokens": 48000}))
    assert answer == {"choices": [{"index": 0}]}
    assert [b"max_tokens" in request for request in server.requests] == [True, False]


async def test_sglang_error_in_the_answer_is_recognized():
    found = b"Requested token count exceeds the model's maximum context length of 2048 tokens."
    body = b'{"object":"error","message":"%s","type":"BadRequestError","param":null,"code":400}' % found
    refused = b"HTTP/1.1 400 Bad Request\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    server = Server([refused], [FRAMED], [refused])
    async with server.upstream() as upstream:
        assert await upstream.complete(UpstreamCall(id="c", request={**REQUEST, "max_tokens": 48000}))
        with pytest.raises(UpstreamError) as too_long:
            await complete(upstream)
    assert str(too_long.value) == found.decode()
    assert too_long.value.details["code"] == "context_length_exceeded"


async def test_overlong_stream_is_shortened_to_the_limit():
    events = b'data: {"a":1}\n\ndata: [DONE]\n\n'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % len(events)
    async with Server([REFUSED], [head + events]).upstream() as upstream:
        request = {**REQUEST, "stream": True, "max_completion_tokens": 48000}
        assert [batch async for batch in upstream.stream(UpstreamCall(id="c", request=request))] == [[{"a": 1}]]


async def test_null_error_is_not_an_error():
    events = b'data: {"error":null,"a":1}\n\ndata: [DONE]\n\n'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n" % len(events)
    async with Server([head + events]).upstream() as upstream:
        call = UpstreamCall(id="c", request={**REQUEST, "stream": True})
        assert [batch async for batch in upstream.stream(call)] == [[{"error": None, "a": 1}]]


async def test_prompt_that_leaves_no_room_for_an_answer_is_rejected():
    server = Server([REFUSED], [REFUSED])
    async with server.upstream() as upstream:
        with pytest.raises(UpstreamError) as refused:
            await upstream.complete(UpstreamCall(id="c", request={**REQUEST, "max_tokens": 9}))
    assert refused.value.details["code"] == "context_length_exceeded"


async def test_redirect_is_not_followed():
    moved = b"HTTP/1.1 302 Found\r\nlocation: /\r\ncontent-length: 0\r\n\r\n"
    async with Server([moved]).upstream() as upstream:
        with pytest.raises(UpstreamError, match="status 302") as refused:
            await complete(upstream)
    assert refused.value.status_code == 502


async def test_events_are_yielded_as_they_arrive():
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"

    def http_chunk(text):
        return b"%x\r\n%s\r\n" % (len(text), text)

    first = http_chunk(b'data: {"a":1}\n\n') + http_chunk(b'data: {"a":2}\n\n')
    second = http_chunk(b'data: {"a"') + http_chunk(b":3}\n\ndata: [DONE]\n\n") + b"0\r\n\r\n"
    async with Server([head + first, second], pause_s=0.05).upstream() as upstream:
        batches = [batch async for batch in upstream.stream(UpstreamCall(id="c", request={**REQUEST, "stream": True}))]
    assert batches == [[{"a": 1}, {"a": 2}], [{"a": 3}]]


async def test_slow_reader_applies_backpressure_to_the_server():
    body = b"x" * 8_000_000
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    async with Server([answer]).upstream() as upstream:
        connection = await upstream._chat(UpstreamCall(id="c", request=REQUEST))
        first = await connection.read_some()
        await asyncio.sleep(0.1)
        assert len(first) + connection._num_buffered < len(body)
        assert len(first) + len(await connection.read()) == len(body)
        connection.close()


@pytest.mark.parametrize(
    ("url", "base_url"),
    [
        ("http://h:1", "http://h:1/v1"),
        ("http://h:1/", "http://h:1/v1"),
        ("https://h/v1/", "https://h/v1"),
        ("http://h/api/v1", "http://h/api/v1"),
        ("http://[::1]:8000", "http://[::1]:8000/v1"),
    ],
)
def test_upstream_url_is_completed(url, base_url):
    assert normalized_base_url(url) == base_url


@pytest.mark.parametrize(
    "url",
    [
        *("", "localhost:8000", "ftp://h/v1", "http://", "http://h:x/v1", "http://h:70000", "http://h/v1?a=1"),
        *("http://a b/v1", "http://h/a b", "http://h\r\nx: y/", "http://h/<v1>", "http://hôte/v1"),
    ],
)
def test_invalid_url_is_rejected(url):
    with pytest.raises(ConfigError, match="base URL"):
        normalized_base_url(url)


def test_url_with_a_password_is_rejected_without_showing_it():
    with pytest.raises(ConfigError, match="RLLM_UPSTREAM_API_KEY") as refused:
        normalized_base_url("http://me:secret@h/v1")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        *((None, None), (b"7", 7.0), (b"soon", None), (b"9" * 400, 86_400.0)),
        *((b"Wed, 21 Oct 2015 07:28:00 GMT", 0.0), (b"Fri, 31 Dec 9999 23:59:59 GMT", 86_400.0)),
    ],
)
async def test_busy_server_reports_when_to_retry(header, seconds):
    busy = b"HTTP/1.1 503 X\r\ncontent-length: 0\r\n"
    answer = busy + (b"retry-after: %s\r\n" % header if header else b"") + b"\r\n"
    async with Server([answer]).upstream() as upstream:
        with pytest.raises(UpstreamError) as refused:
            await complete(upstream)
    assert (refused.value.fault, refused.value.retry_after_s) == ("refused", seconds)


async def test_unreachable_server_never_received_the_call():
    upstream = HTTPUpstream("http://127.0.0.1:9")
    with pytest.raises(UpstreamError, match="cannot be reached") as failed:
        await complete(upstream)
    assert failed.value.fault == "unreachable"


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture
def certificate(authority):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    return context


@pytest.fixture
def trusted(authority, tmp_path, monkeypatch):
    authority.cert_pem.write_to_path(str(tmp_path / "authority.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))


@pytest.mark.usefixtures("trusted")
async def test_server_with_tls_is_called_over_the_same_connection(certificate):
    size = 300_000  # more than a TLS record, and than a buffer
    large = b'{"choices":[{"index":0,"text":"%s"}]}' % (b"x" * size)
    server = Server([FRAMED], [HEAD + b"content-length: %d\r\n\r\n" % len(large), large])
    async with server.upstream(certificate) as upstream:
        assert (await complete(upstream))["choices"] == [{"index": 0}]
        assert len((await complete(upstream))["choices"][0]["text"]) == size
    assert server.num_connections == 1


async def test_untrusted_certificate_error_names_the_remedy(certificate):
    async with Server().upstream(certificate) as upstream:
        with pytest.raises(UpstreamError, match=r"certificate is not trusted here, .* SSL_CERT_FILE") as failed:
            await complete(upstream)
    assert failed.value.fault == "unreachable"


async def test_server_without_tls_error_names_the_remedy():
    async def refuse(reader, writer):
        await reader.read(64)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        upstream = HTTPUpstream(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(UpstreamError, match="begin the address with http://") as failed:
            await complete(upstream)
        await upstream.close()
    assert failed.value.fault == "unreachable"
