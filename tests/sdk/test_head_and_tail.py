import pytest

from rllm.sdk.head_and_tail import HeadAndTail


@pytest.mark.parametrize(
    "pieces", [[b"0123456789"], [b"012", b"34567", b"89"], [bytes([byte]) for byte in b"0123456789"]]
)
def test_half_is_kept_from_either_end(pieces: list[bytes]) -> None:
    kept = HeadAndTail(5)
    assert b"".join(kept.add(piece) for piece in pieces) == b"012"
    assert kept.num_dropped == 5
    assert kept.text() == "012\n[... 5 bytes left out ...]\n89"


@pytest.mark.parametrize("size", [0, 1, 4, 5])
def test_what_fits_is_kept_as_it_is(size: int) -> None:
    kept = HeadAndTail(5)
    kept.add(b"01234"[:size])
    assert kept.text() == "01234"[:size]
    assert kept.num_dropped == 0


def test_a_limit_of_nothing_keeps_nothing() -> None:
    kept = HeadAndTail(0)
    assert kept.add(b"abc") == b""
    assert kept.text() == "\n[... 3 bytes left out ...]\n"


def test_a_character_that_is_cut_does_no_harm() -> None:
    kept = HeadAndTail(2)
    kept.add("äö".encode())
    assert kept.text() == "\N{REPLACEMENT CHARACTER}\n[... 2 bytes left out ...]\n\N{REPLACEMENT CHARACTER}"
