import io
import shutil
import tarfile

import pytest

from rllm.sandbox import SandboxError
from rllm.sandbox.files import pack, unpack


def member(name, kind=tarfile.REGTYPE, *, to="", size=0, mode=0o644):
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size, info.mode = kind, to, size, mode
    return info


def archive(*members):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for each in members:
            tar.addfile(each, io.BytesIO(b"x" * each.size))
    file.seek(0)
    return file


def names(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_folder_round_trip_is_lossless(tmp_path):
    (tmp_path / "in/sub").mkdir(parents=True)
    (tmp_path / "in/sub/run").write_text("run")
    (tmp_path / "in/sub/run").chmod(0o700)
    (tmp_path / "in/link").symlink_to("sub/run")
    file = io.BytesIO()
    pack(tmp_path / "in", file, name="in")
    file.seek(0)
    unpack(file, tmp_path / "out", into_folder=True, max_bytes=100)
    assert names(tmp_path / "out") == ["link", "sub", "sub/run"]
    assert (tmp_path / "out/link").read_text() == "run"
    assert (tmp_path / "out/sub/run").stat().st_mode & 0o777 == 0o755


def test_escaping_names_links_and_devices_are_skipped(tmp_path):
    (tmp_path / "host").write_text("of the host")
    members = [
        member("../host", size=1),
        member(str(tmp_path / "host"), size=1),
        member("d", tarfile.SYMTYPE, to=str(tmp_path)),
        member("d/host", size=1),
        member("here", tarfile.SYMTYPE, to="sub/.."),
        member("through", tarfile.SYMTYPE, to="here/../host"),
        member("up", tarfile.SYMTYPE, to="../host"),
        member("sub/up", tarfile.SYMTYPE, to="../good"),
        member("hard", tarfile.LNKTYPE, to="../host"),
        member("device", tarfile.CHRTYPE),
        member("pipe", tarfile.FIFOTYPE),
        member("good", size=2),
        member("same", tarfile.LNKTYPE, to="good"),
    ]
    unpack(archive(*members), tmp_path / "out", into_folder=True, max_bytes=100)
    assert names(tmp_path / "out") == ["d", "d/host", "good", "same", "sub", "sub/up"]
    assert (tmp_path / "host").read_text() == "of the host"
    assert (tmp_path / "out/sub/up").read_text() == (tmp_path / "out/same").read_text() == "xx"


def test_link_below_a_link_is_rejected(tmp_path):
    """Its target leads out of the folder from its real position, though not from its name."""
    members = [
        member("b", tarfile.DIRTYPE),
        member("x/y/a", tarfile.SYMTYPE, to="../../b"),
        member("x/y/a/up", tarfile.SYMTYPE, to="../../.."),
    ]
    with pytest.raises(SandboxError, match="below a link"):
        unpack(archive(*members), tmp_path / "out", into_folder=True, max_bytes=100)
    assert names(tmp_path / "out/b") == []


def test_header_of_any_size_is_not_read_into_memory(tmp_path):
    long = archive(member("././@LongLink", tarfile.GNUTYPE_LONGNAME, size=3 << 20), member("file"))
    with pytest.raises(SandboxError, match="too long"):
        unpack(long, tmp_path / "out", into_folder=True, max_bytes=1 << 30)


def test_link_is_replaced_instead_of_followed(tmp_path):
    (tmp_path / "host").write_text("of the host")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/file").symlink_to("../host")
    unpack(archive(member("file", size=1)), tmp_path / "out", into_folder=True, max_bytes=1)
    assert (tmp_path / "host").read_text() == "of the host"


def test_limit_counts_all_files_and_their_holes(tmp_path):
    with pytest.raises(SandboxError, match="max_bytes"):
        unpack(archive(member("a", size=60), member("b", size=60)), tmp_path / "1", into_folder=True, max_bytes=100)
    sparse = member("hole", size=512)
    sparse.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(1 << 40)}
    with pytest.raises(SandboxError):
        unpack(archive(sparse), tmp_path / "2", into_folder=True, max_bytes=1000)
    with pytest.raises(SandboxError, match="max_bytes"):
        unpack(archive(member("a", size=60)), tmp_path / "3", into_folder=False, max_bytes=50)
    linked = [member("a", size=60), member("b", tarfile.LNKTYPE, to="a")]
    with pytest.raises(SandboxError, match="max_bytes"):
        unpack(archive(*linked), tmp_path / "4", into_folder=True, max_bytes=100)


def test_folders_too_deep_for_recursion_are_rejected(tmp_path):
    folders = [member("/".join("a" * depth), tarfile.DIRTYPE) for depth in range(1, 1500)]
    with pytest.raises(SandboxError, match="nested more than"):
        unpack(archive(*folders), tmp_path / "out", into_folder=True, max_bytes=100)
    shutil.rmtree(tmp_path / "out")


@pytest.mark.parametrize(
    "content",
    [b"", b"no archive", archive(member("a", size=1), member("a/b", size=1)).read(), archive(member("n" * 300)).read()],
    ids=["empty", "text", "file as folder", "long name"],
)
def test_invalid_archive_is_an_error(tmp_path, content):
    with pytest.raises(SandboxError):
        unpack(io.BytesIO(content), tmp_path / "out", into_folder=True, max_bytes=100)
