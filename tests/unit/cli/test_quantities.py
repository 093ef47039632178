"""Durations and sizes, read and shown."""

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


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("250ms", 250),
        ("2s", 2_000),
        ("1.5s", 1_500),
        (".5s", 500),
        ("0.0015s", 2),
        ("5m", 300_000),
        ("5min", 300_000),
        ("1h", 3_600_000),
        (" 2 s ", 2_000),
        ("0s", 0),
        ("0", 0),
        ("720h", 30 * 24 * 3_600_000),
    ],
)
def test_durations(text: str, milliseconds: int) -> None:
    assert parse_duration_ms(text) == milliseconds


@pytest.mark.parametrize(
    "text", ["", "5", "s", "-1s", "+1s", "2S", "2d", "1e3s", "1_000s", "1.s", "nan", "inf s", "٣s"]
)
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="expected a duration such as 250ms, 2s, 5m or 1h"):
        parse_duration_ms(text)


@pytest.mark.parametrize(
    ("text", "message"), [("721h", "at most 720h"), ("0.4ms", "at least 1ms"), ("1e9h", "such as")]
)
def test_durations_out_of_range(text: str, message: str) -> None:
    with pytest.raises(typer.BadParameter, match=message):
        parse_duration_ms(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512", 512),
        ("512B", 512),
        ("64KiB", 64 << 10),
        ("64MiB", 64 << 20),
        ("1.5GiB", 3 << 29),
        ("64kB", 64_000),
        ("64MB", 64_000_000),
        ("1GB", 10**9),
        ("512m", 512 << 20),
        ("2G", 2 << 30),
        ("0", 0),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MB", "-1MB", "1TB", "1 0", "0x10"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="expected a size such as 512MiB or 1GB"):
        parse_size_bytes(text)


def test_a_size_beyond_all_machines() -> None:
    with pytest.raises(typer.BadParameter, match="at most 1048576GiB"):
        parse_size_bytes("1048577GiB")


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
