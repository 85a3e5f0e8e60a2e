"""A gateway without a key rejects requests from web pages of other sites, and accepts all others from this machine."""

from contextlib import ExitStack

import pytest

from rllm.gateway.config import GatewayConfig

from .conftest import start

CALL = "/sessions/s/v1/chat/completions"
HOSTS = [
    "localhost:8080",
    "127.0.0.1",
    "[::1]:8080",
    "[::1]",
    "192.168.1.7:80",
    "gateway",
    "gateway:8080",
    "LOCALHOST.",
    "agent.localhost:3000",
    "host.docker.internal:8080",
    "printer.local",
    "gateway.home.arpa",
]
STRANGERS = [
    "evil.example",
    "evil.example:8080",
    "127.0.0.1.evil.example:80",
    "localhost.evil.com",
    "7.1.168.192.in-addr.arpa",
    "Evil.Example.",
]
PAGES = [
    {"origin": "https://evil.example"},
    {"origin": "http://203.0.113.5"},
    {"origin": "http://192.168.1.66:8080"},
    {"origin": "https://[2001:db8::1]"},
    {"origin": "null"},
    {},
]


@pytest.fixture(scope="module")
def served():
    with ExitStack() as stack:
        yield start(stack, lambda messages: "hello")


@pytest.mark.parametrize("host", HOSTS)
def test_requests_to_names_of_this_machine_are_answered(served, host):
    assert served.post(headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", STRANGERS)
@pytest.mark.parametrize(("method", "path"), [("POST", CALL), ("GET", "/sessions/s/traces"), ("GET", "/sessions")])
def test_request_to_a_registered_domain_name_is_rejected(served, host, method, path):
    refused = served.http.request(method, path, headers={"host": host}, json={} if method == "POST" else None)
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "web_page"
    assert f"Host: {host}" in refused.json()["error"]["message"]
    assert "--api-key" in refused.json()["error"]["message"]


@pytest.mark.parametrize("page", PAGES)
def test_request_from_a_page_of_another_site_is_rejected(served, page):
    num_calls = served.engine.num_calls
    for browser in ({"sec-fetch-site": "cross-site"}, {}) if page else ({"sec-fetch-site": "cross-site"},):
        refused = served.post(headers={**page, **browser, "content-type": "text/plain"})
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "web_page"
    assert served.engine.num_calls == num_calls


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site", "origin": "http://127.0.0.1:3000"},
        {"sec-fetch-site": "same-origin"},
        {"sec-fetch-mode": "cors"},  # as Node's fetch does
        {"origin": "http://localhost:3000"},
        {"origin": "http://[::1]:3000", "sec-fetch-site": "cross-site"},
    ],
)
def test_requests_from_local_pages_and_programs_are_answered(served, headers):
    assert served.post(headers=headers).status_code == 200


def test_upstreams_are_not_listed_to_pages(serve):
    served = serve(upstream="pool")
    assert served.http.get("/upstreams").status_code == 200
    assert served.http.get("/upstreams", headers={"host": "evil.example"}).status_code == 403


def test_gateway_with_a_key_checks_only_the_key(serve):
    served = serve(lambda messages: "hello", config=GatewayConfig(api_key="secret", shutdown_timeout_s=1.0))
    headers = {"host": "gateway.example.com", "sec-fetch-site": "cross-site", "origin": "https://app.example"}
    assert served.post(headers={**headers, "authorization": "Bearer secret"}).status_code == 200
    assert served.post(headers=headers).status_code == 401


def test_existing_session_does_not_admit_pages(serve):
    served = serve(lambda messages: "hello", config=GatewayConfig(session_ids_admit=True, shutdown_timeout_s=1.0))
    assert served.post().status_code == 200
    assert served.post(headers={"host": "evil.example"}).status_code == 403
