"""Access to the viewer, and restrictions of its pages."""

from __future__ import annotations

import pytest

from .conftest import Client

TOKEN = "a very long token"


@pytest.mark.parametrize(
    "host", ["127.0.0.1:7070", "127.0.0.2:7070", "localhost:1", "localhost", "[::1]", "[::1]:7070", "LOCALHOST:7070"]
)
def test_local_host_names_are_accepted(look: Client, host: str) -> None:
    assert look().get("/", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:7070",
        "127.0.0.1.evil.example",
        "10.0.0.7:7070",
        "localhost@evil.example",
        "evil@localhost",
        "localhost/evil",
        "[",
        "[127.0.0.1].evil.example",
        "::1.evil.example",
        "",
    ],
)
def test_foreign_host_header_is_rejected(look: Client, host: str) -> None:
    answer = look().get("/", headers={"host": host})
    assert answer.status_code == 421
    assert "answers to localhost, 127.0.0.1" in answer.text


def test_token_is_requested_once(look: Client) -> None:
    client = look(token=TOKEN, base_url="http://gpu-box:7070")
    assert client.get("/").status_code == 401
    assert client.get("/static/viewer.css").status_code == 401
    assert client.get(f"/?token={TOKEN}x").status_code == 401
    led = client.get(f"/run/real?with=other&token={TOKEN}")
    assert (led.status_code, led.headers["location"]) == (303, "/run/real?with=other")
    cookie = led.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert TOKEN.replace(" ", "") not in cookie.replace(" ", "")
    assert client.get("/run/real").status_code == 200, "the cookie is enough"


def test_viewers_of_one_host_do_not_overwrite_their_cookies(look: Client) -> None:
    clients = [look(token=f"{port}", base_url=f"http://gpu-box:{port}") for port in (7070, 7071)]
    kept: dict[str, str] = {}  # a browser stores them by host, for all ports
    for client in clients:
        client.get(f"/?token={client.base_url.port}")
        kept |= dict(client.cookies)
    assert len(kept) == 2
    for client in clients:
        client.cookies.update(kept)
        assert client.get("/").status_code == 200


def test_program_sends_its_token_as_a_key(look: Client) -> None:
    client = look(token=TOKEN)
    assert client.get("/", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert client.get("/", headers={"authorization": "Bearer wrong"}).status_code == 401
    assert client.get("/", headers={"cookie": "rllm_viewer_7070=; rllm_viewer_7070=ffff"}).status_code == 401
    assert client.get("/", headers={"cookie": "rllm_viewer_7070=\xe9".encode("latin-1")}).status_code == 401


def test_redirect_after_login_does_not_depend_on_the_name(look: Client) -> None:
    led = look(token=TOKEN).get(f"/run/50%25%20a%3Fb%23c?token={TOKEN}")
    assert led.headers["location"] == "/run/50%25%20a%3Fb%23c"


def test_redirect_after_login_stays_on_this_host(look: Client) -> None:
    led = look(token=TOKEN).get(f"http://127.0.0.1:7070//evil.example/?token={TOKEN}")
    assert led.headers["location"].startswith("/evil.example")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_all_routes_are_read_only(look: Client, method: str) -> None:
    assert look().request(method, "/run/real").status_code == 405


def test_content_security_policy_allows_only_our_scripts(look: Client) -> None:
    for path in ("/", "/run/real", "/run/nix", "/static/viewer.js", "/run/real/pulse.json"):
        policy = look().get(path).headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy


@pytest.mark.parametrize(
    "path", ["/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py", "/static//etc/passwd"]
)
def test_only_our_own_files_are_served(look: Client, path: str) -> None:
    assert look().get(path).status_code == 404
