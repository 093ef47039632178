"""Rows from one JSON array, cut at its commas as the text comes: nothing but the present element is held."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Final

from callyard.errors import UsageError
from callyard.worker.builders import BOM, LINE_BYTES_MAX, JsonlSource, Line

_QUOTE: Final = ord('"')
_COMMA: Final = ord(",")
_END: Final = ord("]")
_BLANK: Final = re.compile(rb"[ \t\r\n]*+")
_TEXT: Final = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_TEXT_REST: Final = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_WITHIN: Final = re.compile(rb'(?:[^"\[\]{}]++|' + _TEXT + rb")*+", re.DOTALL)
_BETWEEN: Final = re.compile(rb'(?:[^"\[\]{},]++|' + _TEXT + rb")*+", re.DOTALL)


class JsonArraySource(JsonlSource):
    """One JSON array whose elements are rows, as `JsonlSource` has them on lines. Read as it comes, never held whole.

    An element that is no row is a failure of its own, with the line that it begins in. Raises `UsageError` when the
    file cannot be opened, or, from `rows`, for a document that is no array.
    """

    _expected = "expected a JSON object or array between the commas"

    def _lines(self) -> Iterator[Line]:
        """The elements. One above `LINE_BYTES_MAX` is given with its first bytes only."""
        text = _ElementText()
        levels = 0
        in_text = False
        chunks = self._chunks()
        start = b""
        while len(start) < len(BOM) and (chunk := next(chunks, b"")):
            start += chunk
        for chunk in itertools.chain((start,), chunks):
            text.feed(chunk)
            while True:
                gap = _BETWEEN if levels == 1 else _WITHIN if levels else _BLANK
                byte = text.skip(_TEXT_REST if in_text else gap)
                if byte is None or (in_text and byte != _QUOTE):
                    break  # all of it, or a backslash whose other half is still to come
                if byte == _QUOTE and levels:
                    in_text = not in_text
                    text.position += 1
                elif levels == 0:
                    self._check_outside(text, byte)
                    text.begin()
                    levels = 1
                elif byte in b"[{":
                    levels += 1
                    text.position += 1
                elif byte == _COMMA:
                    yield text.take() or text.blank(b",")
                elif levels > 1 or byte != _END:
                    levels = max(1, levels - 1)  # a brace too many is what is wrong with this element
                    text.position += 1
                else:
                    last = text.take()
                    if last is not None:
                        yield last
                    elif text.count:
                        yield text.blank(b"]")
                    levels = 0
            text.keep_rest()
        if levels:
            last = text.take()
            if last is not None:
                yield Line(last.number, last.content, last.start, last.size, ended=levels == 1 and not in_text)
            if last is None or (levels == 1 and not in_text):  # whole, but what closes the array did not come
                yield Line(text.blank(b"").number, b"[", 0, 1, ended=False)
        elif not text.begun and self.bytes_read:
            raise UsageError(f"{self.name}: expected a JSON array of rows, got nothing but blanks")

    def _check_outside(self, text: _ElementText, byte: int) -> None:
        if text.begun:
            raise UsageError(f"{self.name}: line {text.line_number()}: expected nothing after the end of the array")
        if byte == ord("["):
            return
        advice = "; rows on lines are JSON Lines: say so with --format jsonl" if byte == ord("{") else ""
        raise UsageError(
            f"{self.name}: line {text.line_number()}: expected a JSON array of rows, got {chr(byte)!r}{advice}"
        )


class _ElementText:
    """The text of an array between two of its commas, as it gathers from chunks."""

    def __init__(self) -> None:
        self.position = 0
        """In the chunk: all before it is understood."""
        self.begun = False
        self.count = 0
        """Elements so far."""
        self._chunk = b""
        self._start = 0
        """Where the element begins in the chunk."""
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._size = 0
        self._lines_held = 0
        self._line = 1
        self._offset = 0
        """Of the element, in the file."""
        self._blank_line = 1

    def feed(self, chunk: bytes) -> None:
        self._chunk += chunk
        if not self.begun and chunk.startswith(BOM):
            self.position = self._start = self._offset = len(BOM)

    def skip(self, pattern: re.Pattern[bytes]) -> int | None:
        """Go behind what `pattern` matches; the byte there, None at the end of the chunk."""
        match = pattern.match(self._chunk, self.position)
        assert match is not None, "the patterns match nothing, too"
        self.position = match.end()
        return self._chunk[self.position] if self.position < len(self._chunk) else None

    def begin(self) -> None:
        self.begun = True
        self._drop()

    def take(self) -> Line | None:
        """The element that ends here, and its comma or bracket dropped; None: there is only blank."""
        self._hold()
        raw = b"".join(self._held)
        content = raw.strip(b" \t\r\n")
        lead = len(raw) - len(raw.lstrip(b" \t\r\n"))
        size = self._size - lead if self._size > len(raw) else len(content)
        line = Line(self._line + raw[:lead].count(b"\n"), content, self._offset + lead, size)
        self._blank_line = line.number
        self._drop()
        if not content:
            return None
        self.count += 1
        return line

    def blank(self, shown: bytes) -> Line:
        """An element that is missing."""
        self.count += 1
        return Line(self._blank_line, shown, self._offset, len(shown))

    def line_number(self) -> int:
        return self._line + self._chunk[self._start : self.position].count(b"\n")

    def keep_rest(self) -> None:
        """At the end of a chunk: of the text that is understood only what an element may have is held."""
        self._hold()
        self._chunk = self._chunk[self.position :]
        self._start = self.position = 0

    def _hold(self) -> None:
        part = self._chunk[self._start : self.position]
        self._start = self.position
        self._size += len(part)
        self._lines_held += part.count(b"\n")
        room = LINE_BYTES_MAX + 1 - self._held_bytes
        self._held.append(part if len(part) <= room else part[: max(0, room)])
        self._held_bytes += len(self._held[-1])

    def _drop(self) -> None:
        """What was held, and the byte after it."""
        self._hold()
        self._line += self._lines_held
        self._offset += self._size + 1
        self._held.clear()
        self._held_bytes = self._size = self._lines_held = 0
        if self.position < len(self._chunk):
            self.position += 1
            self._start = self.position
