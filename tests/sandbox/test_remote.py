"""The services E2B and Daytona as a server that runs commands on this machine, and Modal as a module that does so."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import pytest

from rllm.errors import ConfigError, MissingDependencyError
from rllm.registry import load_object
from rllm.sandbox import SandboxError, SandboxLimits
from rllm.sandbox.base import ImageSource
from rllm.sandbox.remote import E2B, Daytona, Modal

pytestmark = pytest.mark.sandbox

LIMITS = SandboxLimits(cpus=1.5, memory_mb=1500, disk_mb=3000)


def run(*command: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, capture_output=True, env={"PATH": "/usr/bin:/bin", "SERVICE": "1"})


class Service(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        url = urlsplit(self.path)
        server: Server = self.server  # type: ignore[assignment]
        if url.path == "/sandboxes":
            server.created.append((dict(self.headers), json.loads(body)))
            self.answer({"sandboxID": "s1", "envdAccessToken": "token"}, 201)
        elif url.path == "/process.Process/Start":
            assert self.headers["X-Access-Token"] == "token"
            process = json.loads(body[5:])["process"]
            done = run(process["cmd"], *process["args"])
            events = [{"start": {"pid": 1}}]
            events += [
                {"data": {"stdout": base64.b64encode(done.stdout[at:][:1000]).decode()}}
                for at in range(0, len(done.stdout), 1000)
            ]
            events.append({"data": {"stderr": base64.b64encode(done.stderr).decode()}})
            events.append({"end": {"exited": True, **({"exitCode": done.returncode} if done.returncode else {})}})
            frames = [(0, {"event": event}) for event in events] + [(2, {})]
            texts = [(flags, json.dumps(message).encode()) for flags, message in frames]
            self.answer(b"".join(bytes([flags]) + len(text).to_bytes(4, "big") + text for flags, text in texts))
        elif url.path == "/sandbox":
            server.created.append((dict(self.headers), json.loads(body)))
            self.answer(server.daytona)
        elif url.path == "/toolbox/d1/process/execute":
            done = run("sh", "-c", json.loads(body)["command"])
            self.answer({"exitCode": done.returncode, "result": (done.stdout + done.stderr).decode()})
        else:
            assert url.path in ("/files", "/toolbox/d1/files/upload-v2")
            content = body.partition(b"\r\n\r\n")[2].rpartition(b"\r\n--" + body[2:34])[0]
            Path(parse_qs(url.query)["path"][0]).write_bytes(content)
            self.answer([])

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        server: Server = self.server  # type: ignore[assignment]
        if url.path == "/sandbox/d1":
            self.answer({**server.daytona, "state": server.state, "errorReason": "no such image"})
        else:
            assert url.path in ("/files", "/toolbox/d1/files/download")
            self.answer(Path(parse_qs(url.query)["path"][0]).read_bytes())

    def do_DELETE(self) -> None:
        self.server.deleted.append(self.path)  # type: ignore[attr-defined]
        self.answer({})

    def answer(self, value: object, status: int = 200) -> None:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


class Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Service)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.created: list[tuple[dict, dict]] = []
        self.deleted: list[str] = []
        self.state = "started"
        self.daytona = {"id": "d1", "state": "creating", "toolboxProxyUrl": f"{self.url}/toolbox"}


@pytest.fixture
def server(monkeypatch):
    with Server() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        for name in ("E2B_API_URL", "E2B_SANDBOX_URL", "DAYTONA_API_URL"):
            monkeypatch.setenv(name, server.url)
        for name in ("E2B_API_KEY", "DAYTONA_API_KEY", "MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"):
            monkeypatch.setenv(name, "a-key")
        monkeypatch.setenv("RLLM_PUBLIC_GATEWAY_URL", "http://192.0.2.7:8000/")
        yield server
        server.shutdown()


class Aio:
    """A function of Modal's: `f.aio(...)` is awaited."""

    def __init__(self, function):
        self._function = function

    async def aio(self, *arguments, **options):
        return self._function(*arguments, **options)


@pytest.fixture
def modal(monkeypatch):
    created, ended = [], []

    def execute(*command):
        done = run(*command)
        streams = [SimpleNamespace(read=Aio(lambda text=text: text.decode())) for text in (done.stdout, done.stderr)]
        return SimpleNamespace(stdout=streams[0], stderr=streams[1], wait=Aio(lambda: done.returncode))

    def create(*command, **options):
        created.append(options)
        files = SimpleNamespace(
            write_bytes=Aio(lambda data, path: Path(path).write_bytes(data)),
            read_bytes=Aio(lambda path: Path(path).read_bytes()),
        )
        return SimpleNamespace(
            object_id="sb-1", exec=Aio(execute), filesystem=files, terminate=Aio(lambda: ended.append(1))
        )

    module = SimpleNamespace(
        App=SimpleNamespace(lookup=Aio(lambda name, create_if_missing: name)),
        Image=SimpleNamespace(from_registry=lambda name: name),
        Sandbox=SimpleNamespace(create=Aio(create)),
        exception=SimpleNamespace(Error=type("Error", (Exception,), {})),
    )
    monkeypatch.setitem(sys.modules, "modal", module)
    return SimpleNamespace(created=created, ended=ended)


@pytest.mark.parametrize("kind", [E2B, Daytona, Modal])
async def test_commands_run_and_files_are_transferred(server, modal, kind, tmp_path):
    backend = kind()
    backend.check()
    async with await backend.start(
        "image", workdir=str(tmp_path / "work"), mounts={str(tmp_path / "m"): Path(__file__).parent}
    ) as sandbox:
        assert (tmp_path / "m/test_remote.py").is_file()
        pieces = []
        result = await sandbox.exec(
            'pwd; echo "$A"; cat; echo "it\'s wrong" >&2; exit 3',
            env={"A": "two\nlines"},
            input="typed",
            on_output=lambda *piece: pieces.append(piece),
        )
        assert (result.exit_code, result.stderr) == (3, "it's wrong\n")
        assert result.stdout == f"{tmp_path}/work\ntwo\nlines\ntyped"
        assert pieces == [("stdout", result.stdout.encode()), ("stderr", b"it's wrong\n")]
        assert (await sandbox.exec(["echo", "$A", "b c"])).stdout == "$A b c\n"
        long = await sandbox.exec("printf 0123456789; echo", max_output_bytes=4)
        assert (long.stdout, long.num_dropped_bytes) == ("01\n... 7 bytes omitted ...\n9\n", 7)
        assert (await sandbox.exec("kill -SEGV $$")).exit_code == -11
        assert (await sandbox.exec("echo in time", timeout_s=60)).stdout == "in time\n"
        stopped = await sandbox.exec("echo begun; sleep 1121", timeout_s=1)
        assert (stopped.exit_code, stopped.timed_out, stopped.stdout) == (-9, True, "begun\n")

        (tmp_path / "in").write_bytes(b"up\0\r\n\r\nloaded")
        await sandbox.upload(tmp_path / "in", str(tmp_path / "work/sub/file"))
        await sandbox.download(str(tmp_path / "work"), tmp_path / "out")
        await sandbox.download(str(tmp_path / "work/sub/file"), tmp_path / "one")
        assert (tmp_path / "out/sub/file").read_bytes() == (tmp_path / "one").read_bytes() == b"up\0\r\n\r\nloaded"
        with pytest.raises(SandboxError, match="no such file"):
            await sandbox.download(str(tmp_path / "missing"), tmp_path / "out")
        with pytest.raises(SandboxError):
            await sandbox.exec("true", cwd=str(tmp_path / "missing"))
        route = await sandbox.open_route("http://127.0.0.1:1/sessions/1/v1")
    assert route == "http://192.0.2.7:8000/sessions/1/v1"
    await sandbox.close()
    with pytest.raises(SandboxError, match="closed"):
        await sandbox.exec("true")
    assert server.deleted + modal.ended in (["/sandboxes/s1"], ["/sandbox/d1"], [1])


@pytest.mark.parametrize("public", ["http://192.0.2.7:8000", None])
async def test_network_allows_only_the_public_gateway(server, modal, monkeypatch, public):
    if not public:
        monkeypatch.delenv("RLLM_PUBLIC_GATEWAY_URL")
    for kind in (E2B, Daytona, Modal):
        async with await kind().start("image:1", limits=LIMITS, env={"A": "1"}) as sandbox:
            if not public:
                with pytest.raises(ConfigError, match="RLLM_PUBLIC_GATEWAY_URL"):
                    await sandbox.open_route("http://127.0.0.1:1/sessions/1")
    (e2b_headers, e2b), (daytona_headers, daytona) = server.created
    assert e2b_headers["X-API-KEY"] == "a-key"
    assert e2b["network"] == {"denyOut": ["0.0.0.0/0"], "allowOut": ["192.0.2.7/32"] if public else []}
    assert (e2b["templateID"], e2b["envVars"]) == ("image:1", {"A": "1"})
    assert daytona_headers["Authorization"] == "Bearer a-key"
    assert daytona["buildInfo"] == {"dockerfileContent": "FROM image:1\n"}
    assert (daytona["cpu"], daytona["memory"], daytona["disk"]) == (2, 2, 3)
    assert daytona.get("networkAllowList") == ("192.0.2.7/32" if public else None)
    assert daytona.get("networkBlockAll") is (None if public else True)
    assert modal.created[0]["memory"] == (1500, 1500)
    assert modal.created[0].get("outbound_cidr_allowlist") == (["192.0.2.7/32"] if public else None)
    assert modal.created[0].get("block_network") is (None if public else True)


async def test_sandbox_that_does_not_start_is_an_error_and_deleted(server, monkeypatch):
    server.state = "build_failed"
    with pytest.raises(SandboxError, match="no such image"):
        await Daytona().start("image")
    assert server.deleted == ["/sandbox/d1"]
    monkeypatch.setenv("E2B_API_URL", f"{server.url}/nowhere")
    with pytest.raises(SandboxError, match="nowhere"):
        await E2B().start("image")


async def test_sandbox_that_ended_by_itself_is_closed(server, monkeypatch, caplog):
    async with await E2B().start("image"):
        monkeypatch.setattr(Service, "do_DELETE", lambda self: self.answer({}, 404))
    assert "may still exist" in caplog.text


async def test_missing_keys_packages_and_images_are_reported(server, monkeypatch, tmp_path):
    with pytest.raises(SandboxError, match="docker_image"):
        await E2B().image(ImageSource(folder=tmp_path))
    monkeypatch.setitem(sys.modules, "modal", None)
    with pytest.raises(MissingDependencyError, match="pip install modal"):
        Modal().check()
    monkeypatch.setenv("RLLM_PUBLIC_GATEWAY_URL", "192.0.2.7")
    with pytest.raises(ConfigError, match="RLLM_PUBLIC_GATEWAY_URL"):
        E2B().check()
    monkeypatch.delenv("E2B_API_KEY")
    with pytest.raises(ConfigError, match=r"sandbox=e2b.*E2B_API_KEY"):
        E2B().check()


def test_package_declares_the_remote_backends():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    declared = project["entry-points"]["rllm.sandboxes"]
    loaded = {name: load_object(path, kind="sandbox") for name, path in declared.items()}
    assert loaded == {"e2b": E2B, "daytona": Daytona, "modal": Modal}
