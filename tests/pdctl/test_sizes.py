"""Sizes: what people write, and what is refused with a way out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.sizes import exact_size, format_size, listed, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("512MiB", 512 << 20),
        ("2GB", 2_000_000_000),
        ("1.5GiB", 3 << 29),
        ("1 KiB", 1024),
        (" 7b ", 7),
        ("65536", 65536),
        (65536, 65536),
        ("10gib", 10 << 30),
        ("1TB", 10**12),
    ],
)
def test_sizes_as_people_write_them(text: str | int, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("512M", "write 512MiB (1024) or 512MB (1000)"),
        ("5x", "use B, KiB, MiB"),
        ("", "write it like 512MiB"),
        ("-1", "write it like 512MiB"),
        ("1e9", "write it like 512MiB"),
        ("MiB", "write it like 512MiB"),
        ("0", "no memory at all"),
        (0, "no memory at all"),
        (-5, "no memory at all"),
        ("0.3B", "not a whole number of bytes"),
        ("9999TiB", "check the unit"),
        ("٣MiB", "write it like 512MiB"),
    ],
)
def test_what_is_no_size_says_what_would_be(value: str | int, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_size(value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [True, None, 1.5, [], {}])
def test_other_types(value: object) -> None:
    with pytest.raises(ValueError, match="must be a size"):
        parse_size(value)  # type: ignore[arg-type]


@given(st.integers(1, 1 << 50), st.sampled_from(["B", "KiB", "MiB", "GiB", "KB", "MB", "GB"]))
def test_a_whole_number_of_units_is_exact(number: int, unit: str) -> None:
    scale = parse_size(f"1{unit}")
    if number * scale <= 1 << 50:
        assert parse_size(f"{number}{unit}") == number * scale


@given(st.integers(1, 1 << 49))
def test_formatting_is_exact_or_within_a_twentieth(nbytes: int) -> None:
    text = format_size(nbytes)
    try:
        back = parse_size(text)
    except ValueError:  # a rounded number of a unit need not be a whole number of bytes
        back = int(float(text[:-3]) * parse_size(f"1{text[-3:]}"))
    assert abs(back - nbytes) <= nbytes / 20
    if nbytes % (1 << 20) == 0 and nbytes < 1 << 30:
        assert back == nbytes


@given(st.integers(1, 1 << 50))
def test_an_exact_size_is_read_back_as_it_was(nbytes: int) -> None:
    assert parse_size(exact_size(nbytes)) == nbytes


def test_of_many_names_only_the_first_are_said() -> None:
    names = [f"decode-{n}" for n in range(98)]
    assert listed(names[:8]) == ", ".join(names[:8])
    assert listed(names) == f"{', '.join(names[:6])} and 92 more"
