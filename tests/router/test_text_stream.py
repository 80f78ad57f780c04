"""Text leaves in order, whole characters only, and never a part of a stop string."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.decoders import ByteFallback

from sangam_router.text_stream import Detokenizer, StopScanner, TextStream


def decode(ids: list[int]) -> str:
    """A byte-level tokenizer: ids are bytes, higher ones are special and left out."""
    return bytes(i for i in ids if i < 256).decode(errors="replace")


def cut(items: list[int], sizes: list[int]) -> list[list[int]]:
    """Pieces of a list, of sizes taken in turn."""
    pieces, start = [], 0
    for size in sizes:
        pieces.append(items[start : start + size])
        start += size
    return [*pieces, items[start:]]


SIZES = st.lists(st.integers(0, 5), max_size=30)


@given(st.text(max_size=60), SIZES)
def test_pieces_add_up_to_the_whole_text(text: str, sizes: list[int]) -> None:
    stream = TextStream(decode)
    out = ""
    for piece in cut(list(text.encode()), sizes):
        out += stream.push(piece)
        assert text.startswith(out), "what was sent is never taken back"
    assert out + stream.finish() == text


@given(st.binary(max_size=60), SIZES)
def test_bytes_that_are_no_text_come_out_as_the_decoder_shows_them(
    raw: bytes, sizes: list[int]
) -> None:
    stream = Detokenizer(decode)
    out = "".join(stream.push(piece) for piece in cut(list(raw), sizes))
    assert out + stream.finish() == raw.decode(errors="replace")


def first_stop(text: str, stops: list[str]) -> str:
    """The text before the stop string that completes first."""
    for end in range(len(text) + 1):
        starts = [end - len(s) for s in stops if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)]
    return text


LETTERS = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4)


@given(LETTERS, STOPS, SIZES)
def test_the_stop_string_that_completes_first_ends_the_text_however_it_is_cut(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    stream = TextStream(decode, stops)
    out = ""
    expected = first_stop(text, stops)
    for piece in cut(list(text.encode()), sizes):
        if stream.is_stopped:
            break
        out += stream.push(piece)
        assert expected.startswith(out), "no part of a stop string leaks"
    out += stream.finish()
    assert out == expected
    assert stream.is_stopped == (expected != text or any(text.endswith(s) for s in stops))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_short_stop_string_within_a_long_one_wins_although_it_starts_later(size: int) -> None:
    stream, out = TextStream(decode, ["bcde", "cd"]), ""
    for piece in cut(list(b"abcdef"), [size] * 6):
        out += "" if stream.is_stopped else stream.push(piece)
    assert (out, stream.num_tokens) == ("ab", 4)


@given(LETTERS, STOPS, SIZES)
def test_tokens_count_up_to_the_one_that_completes_the_stop_string(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    stream = TextStream(decode, stops)
    for piece in cut(list(text.encode()), sizes):
        if not stream.is_stopped:
            stream.push(piece)
    stream.finish()
    counted = text[: stream.num_tokens]
    if stream.is_stopped:
        assert any(counted.endswith(stop) for stop in stops)
        assert not any(stop in counted[:-1] for stop in stops)
    else:
        assert counted == text


def test_half_a_character_waits_for_its_other_half() -> None:
    stream = TextStream(decode)
    euro = list("€".encode())
    assert stream.push([65, *euro[:2]]) == "A"
    assert stream.push(euro[2:]) == "€"


def test_text_that_a_later_byte_unsettles_for_a_while_is_sent_once() -> None:
    """A run of byte tokens is no text at all while its last character is incomplete."""
    fallback = ByteFallback()
    stream = TextStream(lambda ids: fallback.decode([f"<0x{byte:02X}>" for byte in ids]))
    pieces = [stream.push([byte]) for byte in "A€".encode()]
    assert [*pieces, stream.finish()] == ["A", "", "", "€", ""]


def test_a_stop_string_across_characters_of_several_bytes_is_found() -> None:
    stream = TextStream(decode, ["é!"])
    raw = list("café!x".encode())
    out = "".join(stream.push([byte]) for byte in raw[:-1])
    assert out == "caf"
    assert stream.is_stopped
    assert stream.num_tokens == len(raw) - 1


def test_what_could_have_become_a_stop_string_comes_at_the_end() -> None:
    stream = TextStream(decode, ["\nuser:"])
    assert stream.push(list(b"bye\nuse")) == "bye"
    assert stream.finish() == "\nuse"
    assert stream.finish() == ""


def test_special_tokens_have_no_text() -> None:
    stream = TextStream(decode)
    assert stream.push([104, 300, 105]) == "hi"
    assert stream.num_tokens == 3


@pytest.mark.parametrize("stop", ["aa", "aba"])
def test_a_scanner_holds_back_no_more_than_it_must(stop: str) -> None:
    scanner = StopScanner([stop])
    assert scanner.push("ba") == "b"
    assert scanner.push("c") == "ac"
