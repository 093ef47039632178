"""Durations and sizes as people write them: the same in options and in a settings file."""

from __future__ import annotations

import pytest

from callyard.errors import UsageError
from callyard.quantities import read_duration_ms, read_size_bytes
from callyard.worker.io.config import IoConfig


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("250ms", 250),
        ("2s", 2_000),
        ("1.5s", 1_500),
        (".5s", 500),
        ("0.0015s", 1.5),
        ("5m", 300_000),
        ("5min", 300_000),
        ("1.5h", 5_400_000),
        (" 2 s ", 2_000),
        ("0s", 0),
        ("0", 0),
        ("720h", 30 * 24 * 3_600_000),
    ],
)
def test_durations(text: str, milliseconds: float) -> None:
    assert read_duration_ms(text) == pytest.approx(milliseconds)


@pytest.mark.parametrize(
    "text", ["", "5", "s", "-1s", "+1s", "2S", "2d", "1e3s", "1e9h", "1_000s", "1.s", "nan", "inf s", "٣s", "1 0"]
)
def test_what_is_no_duration(text: str) -> None:
    assert read_duration_ms(text) is None


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
        ("64M", 64 << 20),
        ("512m", 512 << 20),
        ("2G", 2 << 30),
        ("8k", 8 << 10),
        (".5k", 512),
        ("0", 0),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert read_size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MB", "-1MB", "1TB", "1 0", "0x10", "1.", "٣"])
def test_what_is_no_size(text: str) -> None:
    assert read_size_bytes(text) is None


@pytest.mark.requirement("X42")
def test_a_settings_file_takes_what_an_option_takes() -> None:
    config = IoConfig.from_mapping({"http": {"timeout": ".5s", "max_bytes": "2M"}, "cache_bytes_max": "1g"})
    assert (config.http.timeout_ms, config.http.max_bytes) == (500, 2 << 20)
    assert config.limits.cache_bytes_max == 1 << 30
    with pytest.raises(UsageError, match=r"io\.http\.timeout: expected a duration such as 500ms or 30s, .*, got 5"):
        IoConfig.from_mapping({"http": {"timeout": 5}})
