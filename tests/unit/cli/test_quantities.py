"""Values of options: what is refused, in which words; durations and sizes as they are shown."""

from __future__ import annotations

import pytest
import typer

from callyard.cli.quantities import (
    parse_count,
    parse_duration_ms,
    parse_executors,
    parse_size_bytes,
    parse_start_timeout_ms,
    show_duration,
    show_size,
)


def test_durations_and_sizes_are_rounded() -> None:
    assert (parse_duration_ms("0.0015s"), parse_duration_ms("0"), parse_duration_ms("720h")) == (2, 0, 2_592_000_000)
    assert (parse_size_bytes("1.5KiB"), parse_size_bytes("0"), parse_size_bytes(".5")) == (1_536, 0, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5", "expected a duration such as 250ms, 2s, 5m or 1h, got '5'"),
        ("721h", "at most 720h"),
        ("0.4ms", "at least 1ms"),
    ],
)
def test_durations_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(typer.BadParameter, match=message):
        parse_duration_ms(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [("1TB", "expected a size such as 512MiB or 1GB, got '1TB'"), ("1048577GiB", "at most 1048576GiB")],
)
def test_sizes_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(typer.BadParameter, match=message):
        parse_size_bytes(text)


@pytest.mark.parametrize(
    ("milliseconds", "shown"),
    [
        (0, "0 ms"),
        (2, "2 ms"),
        (999.4, "999 ms"),
        (999.6, "1 s"),
        (1_540, "1.5 s"),
        (12_340, "12.3 s"),
        (30_000, "30 s"),
        (59_940, "59.9 s"),
        (59_960, "1 min 00 s"),
        (245_000, "4 min 05 s"),
        (3_599_600, "1 h 00 min"),
        (3_720_000, "1 h 02 min"),
    ],
)
def test_shown_durations(milliseconds: float, shown: str) -> None:
    assert show_duration(milliseconds) == shown


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (999, "999 B"),
        (1_000, "1 kB"),
        (812_345, "812 kB"),
        (999_600, "1.0 MB"),
        (64_200_000, "64.2 MB"),
        (999_960_000, "1.0 GB"),
        (3_100_000_000, "3.1 GB"),
    ],
)
def test_shown_sizes(size: int, shown: str) -> None:
    assert show_size(size) == shown


@pytest.mark.parametrize("text", ["-1", "x", "", "1.5", "٣", "9" * 30])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(typer.BadParameter, match=f"expected a whole number of at least 0, got '{text}'"):
        parse_count(text)


def test_counts_and_times_of_the_settings_ranges() -> None:
    assert (parse_count("0"), parse_executors("1024"), parse_start_timeout_ms("2s")) == (0, 1_024, 2_000)
    with pytest.raises(typer.BadParameter, match="expected a whole number from 1 to 1024, got '2000'"):
        parse_executors("2000")
    with pytest.raises(typer.BadParameter, match="expected from 100 ms to 24 h, got '5ms'"):
        parse_start_timeout_ms("5ms")
