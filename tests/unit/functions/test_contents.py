"""Contents of results: made, encoded, read again; and what is refused."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from callyard import Audio, File, Image, Message, ResourceLink
from callyard.functions.contents import (
    Block,
    encode_result,
    extension_of,
    read_contents,
    read_messages,
    read_returned,
    sniff_mime_type,
)
from callyard.functions.encoding import ResultMisfit, encode_canonical
from callyard.functions.function import Role
from callyard.functions.signature import Invocable

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(40))
WAV = b"RIFF\x00\x00\x00\x00WAVEfmt "


def encode(value: object, role: Role = "tool", mime_type: str = "", bytes_max: int = 10_000) -> Any:
    return json.loads(encode_result(value, bytes_max, role, mime_type))


# --- the form in JSON -----------------------------------------------------------------------------------------------


def test_each_content_has_one_form() -> None:
    link = ResourceLink("test://x/y.csv", title="Y", description="Rows", mime_type="text/csv", size=5)
    value = ["see", Image(b"GIF8a"), Audio(WAV, name="w.wav"), File(b"\x00\x01"), File(b"{}", name="a.json"), link]
    assert encode(value) == {
        "callyard.content": [
            {"type": "text", "text": "see"},
            {"type": "image", "data": "R0lGOGE=", "mime_type": "image/gif"},
            {"type": "audio", "data": "UklGRgAAAABXQVZFZm10IA==", "mime_type": "audio/wav", "name": "w.wav"},
            {"type": "file", "data": "AAE=", "mime_type": "application/octet-stream"},
            {"type": "file", "text": "{}", "mime_type": "application/json", "name": "a.json"},
            {
                "type": "resource_link",
                "mime_type": "text/csv",
                "uri": "test://x/y.csv",
                "name": "y.csv",
                "title": "Y",
                "description": "Rows",
                "size": 5,
            },
        ]
    }


@pytest.mark.parametrize("value", [{"a": 1}, [1, "a"], ["only", "text"], "text", None, 1.5, (), [], {"x": [[1]]}])
def test_what_holds_no_content_is_plain_json(value: Any) -> None:
    raw = encode_result(value, 1_000)
    assert json.loads(raw) == (list(value) if isinstance(value, tuple) else value)
    assert read_contents(raw) is read_messages(raw) is read_returned(raw) is None


@pytest.mark.parametrize(
    "value",
    [
        Image(PNG),
        Image(b"<svg/>", "image/svg+xml", name="a.svg"),
        Audio(WAV),
        File(b"\x00"),
        File("é".encode()),
        File("é".encode("latin-1"), "text/plain"),
        File(b"", name="empty.txt", uri="test://e"),
        ResourceLink("test://a"),
        ["", Image(PNG), "after"],
    ],
)
def test_what_was_returned_comes_back(value: Any) -> None:
    assert read_returned(encode_result(value, 10_000)) == value


def test_a_tuple_of_contents_is_a_list_of_them() -> None:
    assert read_returned(encode_result(("a", Image(PNG)), 1_000)) == ["a", Image(PNG)]


@pytest.mark.requirement("D26")
@pytest.mark.parametrize(
    ("value", "pointer", "message"),
    [
        ({"x": [1, Image(PNG)]}, "/x/1", "callyard.Image has no JSON form: return it by itself, or in a list of"),
        ([[Image(PNG)]], "/0/0", "return it by itself"),
        (["a", Image(PNG), {"a": 1}], "/2", "a list with a content holds contents and text only, got dict"),
        (Message("user", "x"), "", "only a function with @prompt returns messages"),
        ([Image(PNG)] * 1_001, "", "1001 contents, expected at most 1000"),
    ],
)
def test_contents_elsewhere_are_refused_with_their_place(value: Any, pointer: str, message: str) -> None:
    with pytest.raises(ResultMisfit, match=message) as caught:
        encode_result(value, 10_000)
    assert caught.value.details["pointer"] == pointer


def test_contents_are_no_arguments() -> None:
    with pytest.raises(ResultMisfit, match="return it by itself"):
        encode_canonical({"a": Image(PNG)})


@pytest.mark.requirement("D26")
def test_the_encoded_size_counts() -> None:
    size = len(encode_result(Image(PNG), 10_000))
    assert size > len(PNG) * 4 / 3
    assert encode_result(Image(PNG), size)
    with pytest.raises(ResultMisfit, match=f"result of {size} bytes exceeds max_result_bytes={size - 1}"):
        encode_result(Image(PNG), size - 1)


def test_text_with_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(ResultMisfit, match="lone surrogate"):
        encode_result(["\ud800", Image(PNG)], 1_000)


# --- prompts and resources ------------------------------------------------------------------------------------------


def test_messages_of_a_prompt() -> None:
    text = {"type": "text", "text": "hi"}
    image = {"type": "image", "data": "R0lGOGE=", "mime_type": "image/gif"}
    user, assistant = {"role": "user", "content": text}, {"role": "assistant", "content": text}
    seen = {"role": "user", "content": image}
    for value, messages in (
        ("hi", [user]),
        (Message("assistant", "hi"), [assistant]),
        (["hi", Message("assistant", "hi"), Image(b"GIF8a")], [user, assistant, seen]),
        (Message("user", ["hi", Image(b"GIF8a")]), [user, seen]),
        ([], []),
    ):
        assert encode(value, "prompt") == {"callyard.messages": messages}
    returned = [Message("user", "hi"), Message("assistant", Image(PNG))]
    assert read_returned(encode_result(returned, 1_000, "prompt")) == returned


@pytest.mark.parametrize("value", [None, 5, {"role": "user"}, ["a", 5], Message("user", [])])
def test_what_is_no_message_is_refused(value: Any) -> None:
    with pytest.raises(ResultMisfit, match="a prompt returns text, a Message, a content, or a list of these"):
        encode_result(value, 1_000, "prompt")


def test_a_role_of_no_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="'user' or 'assistant', got 'system'"):
        Message("system", "x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "mime_type", "block"),
    [
        ("x", "", {"text": "x", "mime_type": "text/plain"}),
        ("x", "text/html", {"text": "x", "mime_type": "text/html"}),
        (b"GIF8", "", {"data": "R0lGOA==", "mime_type": "image/gif"}),
        (b"\xff", "text/plain", {"data": "/w==", "mime_type": "text/plain"}),
        (b"x", "application/json", {"text": "x", "mime_type": "application/json"}),
        ({"a": [1]}, "", {"text": '{"a":[1]}', "mime_type": "application/json"}),
        (["a"], "", {"text": '["a"]', "mime_type": "application/json"}),
        (7, "", {"text": "7", "mime_type": "application/json"}),
        (Image(b"GIF8"), "text/plain", {"data": "R0lGOA==", "mime_type": "image/gif"}),
        (File(b"x", uri="test://1"), "", {"text": "x", "mime_type": "text/plain", "uri": "test://1"}),
    ],
)
def test_a_resource_is_files(value: Any, mime_type: str, block: dict[str, str]) -> None:
    assert encode(value, "resource", mime_type) == {"callyard.content": [{"type": "file", **block}]}


def test_a_resource_that_returns_none_is_not_there_and_one_of_links_is_refused() -> None:
    assert encode_result(None, 100, "resource") == b"null"
    with pytest.raises(ResultMisfit, match="not a link"):
        encode_result(["a", ResourceLink("test://a")], 1_000, "resource")


# --- reading what an executor sent ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "block",
    [
        {"type": "video", "data": "AA=="},
        {"type": "text"},
        {"type": "text", "text": "a", "data": "AA=="},
        {"type": "image", "data": "AA=="},
        {"type": "image", "data": "not base64!", "mime_type": "image/png"},
        {"type": "image", "text": "x", "mime_type": "image/png"},
        {"type": "file", "text": "x", "data": "AA==", "mime_type": "text/plain"},
        {"type": "file", "mime_type": "text/plain"},
        {"type": "resource_link", "uri": "test://x"},
        {"type": "resource_link", "uri": "test://x", "name": "x", "text": "y"},
        5,
    ],
)
def test_what_only_looks_like_contents_is_other_json(block: Any) -> None:
    assert read_contents(json.dumps({"callyard.content": [block]}, separators=(",", ":")).encode()) is None


@pytest.mark.parametrize(
    "raw", [b'{"callyard.content":[],"more":1}', b'{"callyard.content":', b'{"callyard.content":{}}', b"", b"\xff"]
)
def test_broken_outputs_are_other_json(raw: bytes) -> None:
    assert read_contents(raw) is read_messages(raw) is None


@given(st.binary(max_size=80))
def test_reading_never_raises(rest: bytes) -> None:
    for start in (b"", b'{"callyard.content":', b'{"callyard.content":[{"type":"image",', b'{"callyard.messages":['):
        for raw in (start + rest, start + rest + b"}]}"):
            read_contents(raw)
            read_messages(raw)


_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_CONTENT = st.one_of(
    _TEXT,
    st.binary(max_size=40).map(lambda data: Image(data, "image/png")),
    st.builds(File, st.binary(max_size=40), st.sampled_from([None, "text/plain", "application/x-y"]), uri=_TEXT),
    st.builds(ResourceLink, st.just("test://a/b")),
)


@given(st.lists(_CONTENT, min_size=1, max_size=6))
def test_any_contents_come_back(contents: list[Any]) -> None:
    value = [*contents, Image(PNG)]
    blocks = read_contents(encode_result(value, 100_000))
    assert blocks is not None
    assert [block.to_content() for block in blocks] == value


# --- making them ----------------------------------------------------------------------------------------------------


def test_a_file_is_read_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "chart.PNG").write_bytes(b"any bytes")
    (tmp_path / "notes.md").write_text("# A")
    image, notes = Image(tmp_path / "chart.PNG"), File(str(tmp_path / "notes.md"))
    (tmp_path / "chart.PNG").unlink()
    assert (image.data, image.mime_type, image.name) == (b"any bytes", "image/png", "chart.PNG")
    assert notes.to_block() == Block("file", text="# A", mime_type="text/markdown", name="notes.md")
    with pytest.raises(FileNotFoundError):
        Image(tmp_path / "chart.PNG")


def test_an_image_of_no_known_type_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Image data of a type image/…, got data of no known type: say mime_type="):
        Image(b"???")
    with pytest.raises(ValueError, match="got mime_type 'audio/wav'"):
        Image(WAV)
    with pytest.raises(ValueError, match="Audio data of a type audio/"):
        Audio(PNG)
    with pytest.raises(TypeError, match="File takes bytes or the path of a file, got int"):
        File(5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data", "name", "kind"),
    [
        (b"\xff\xd8\xff\xe0", "", "image/jpeg"),
        (b"RIFF....WEBPVP8", "", "image/webp"),
        (b"%PDF-1.7", "", "application/pdf"),
        (b"", "a.CSV", "text/csv"),
        (PNG, "a.jpg", "image/jpeg"),
        (PNG, "png", "image/png"),
        (b"abc", "a.unknown", ""),
    ],
)
def test_types_by_name_and_by_bytes(data: bytes, name: str, kind: str) -> None:
    assert sniff_mime_type(data, name) == kind


def test_extensions_of_types() -> None:
    kinds = ("image/jpeg", "text/plain; charset=utf-8", "text/x-odd", "application/x-odd")
    assert [extension_of(kind) for kind in kinds] == [".jpg", ".txt", ".txt", ".bin"]


class _Picture:
    mode = "RGB"

    def save(self, buffer: Any, format: str) -> None:
        buffer.write(b"\x89PNG by " + f"{format} {self.mode}".encode())

    def convert(self, mode: str) -> _Picture:
        other = _Picture()
        other.mode = mode
        return other


class _Figure:
    def savefig(self, buffer: Any, format: str) -> None:
        buffer.write(b"\x89PNG figure")


def test_pictures_of_other_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(_Picture):
        mode = "CMYK"

    assert read_contents(b"null") is None
    with pytest.raises(ResultMisfit):  # not known before its library is loaded
        encode_result(_Picture(), 1_000)
    for name, key, value in (("PIL.Image", "Image", _Picture), ("matplotlib.figure", "Figure", _Figure)):
        module = types.ModuleType(name)
        setattr(module, key, value)
        monkeypatch.setitem(sys.modules, name, module)
    assert Image(_Figure()).data == b"\x89PNG figure"
    assert read_returned(encode_result([_Picture(), "and", Mine()], 1_000)) == [
        Image(b"\x89PNG by PNG RGB", "image/png"),
        "and",
        Image(b"\x89PNG by PNG RGB", "image/png"),
    ]


# --- annotations ------------------------------------------------------------------------------------------------------


def test_a_content_as_annotation_gives_no_output_schema() -> None:
    def one() -> Image: ...
    def some() -> list[str | Image | File]: ...
    def maybe() -> ResourceLink | None: ...
    def both() -> tuple[str, Audio]: ...

    for target in (one, some, maybe, both):
        assert Invocable("f", target).output_schema() == {}
