"""Contents: images, audio, files and links that functions return, and the one JSON form they travel in.

An executor encodes what a function returned (`encode_result`); a gate, the command line and a parent call read it
(`read_contents`, `read_messages`). In between it is JSON like any other result: counted, cached, stored, kept.

```text
tool, resource   {"callyard.content": [block, …]}
prompt           {"callyard.messages": [{"role": "user" | "assistant", "content": block}, …]}
```

A block is a `Block`. Contents stand at the top of a result only, alone or in a list beside text; deeper they are
refused, since no reader would look for them there. Source: issue "serve", results people return.
"""

from __future__ import annotations

import base64
import io
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import msgspec

from callyard.functions.encoding import ResultMisfit, check_size, encode_value, type_name
from callyard.functions.function import Role
from callyard.functions.packing import encode_crossing

CONTENT_TAG: Final = "callyard.content"
MESSAGES_TAG: Final = "callyard.messages"
BLOCKS_MAX: Final = 1_000
"""Most contents, or messages, of one result."""

Source: TypeAlias = "bytes | bytearray | memoryview | str | os.PathLike[str]"
"""Bytes, or the path of a file, which is read at once."""
MessageRole = Literal["user", "assistant"]
BlockType = Literal["text", "image", "audio", "file", "resource_link"]


# --- what functions return ------------------------------------------------------------------------------------------


class Content:
    """What is more than a JSON value: its own bytes, and what they are."""

    __slots__ = ()
    __callyard_advice__ = (
        "return it by itself, or in a list of contents and text: it cannot stand inside of other values"
    )
    """What `encoding` says where it meets one."""

    def to_block(self) -> Block:
        raise NotImplementedError


class _Data(Content):
    __slots__ = ("data", "mime_type", "name")

    data: bytes
    mime_type: str
    name: str
    """Of the file that it was read from, or is to be; empty: none."""

    def __init__(self, source: Source, mime_type: str | None, name: str | None) -> None:
        self.data, own_name = _read_source(source, type(self).__name__)
        self.name = own_name if name is None else name
        self.mime_type = sniff_mime_type(self.data, self.name) if mime_type is None else mime_type

    def __repr__(self) -> str:
        named = f", name={self.name!r}" if self.name else ""
        return f"{type(self).__name__}({len(self.data)} bytes, {self.mime_type!r}{named})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.to_block() == self.to_block()

    __hash__ = None  # type: ignore[assignment]

    def _check_kind(self, kind: str) -> None:
        if not self.mime_type.startswith(f"{kind}/"):
            shown = f"mime_type {self.mime_type!r}" if self.mime_type else "data of no known type"
            who = type(self).__name__
            raise ValueError(f"expected {who} data of a type {kind}/…, got {shown}: say mime_type=, or use File")


class Image(_Data):
    """A picture: bytes, the path of a file, a PIL image or a matplotlib figure.

    Raises `ValueError` where the type of image neither shows nor is said, `OSError` for a file that cannot be read.
    """

    __module__ = "callyard"
    __slots__ = ()

    def __init__(self, source: Source | Any, mime_type: str | None = None, *, name: str | None = None) -> None:
        drawn = _draw(source)
        if drawn is not None:
            source, mime_type = drawn, "image/png"
        super().__init__(source, mime_type, name)
        self._check_kind("image")

    def to_block(self) -> Block:
        return Block("image", data=self.data, mime_type=self.mime_type, name=self.name)


class Audio(_Data):
    """A sound: bytes, or the path of a file. Raises as `Image`."""

    __module__ = "callyard"
    __slots__ = ()

    def __init__(self, source: Source, mime_type: str | None = None, *, name: str | None = None) -> None:
        super().__init__(source, mime_type, name)
        self._check_kind("audio")

    def to_block(self) -> Block:
        return Block("audio", data=self.data, mime_type=self.mime_type, name=self.name)


class File(_Data):
    """Any bytes, or the file of a path. `uri`: what it is known by; MCP calls it an embedded resource then."""

    __module__ = "callyard"
    __slots__ = ("uri",)

    def __init__(self, source: Source, mime_type: str | None = None, *, name: str | None = None, uri: str = "") -> None:
        super().__init__(source, mime_type, name)
        self.mime_type = self.mime_type or _guess_plain(self.data)
        self.uri = uri

    def to_block(self) -> Block:
        return _file_block(self.data, self.mime_type, name=self.name, uri=self.uri)


class ResourceLink(Content):
    """Where something is, to be read by whoever wants it. `name`: default, the last part of the URI."""

    __module__ = "callyard"
    __slots__ = ("description", "mime_type", "name", "size", "title", "uri")

    def __init__(
        self,
        uri: str,
        name: str | None = None,
        *,
        title: str = "",
        description: str = "",
        mime_type: str = "",
        size: int | None = None,
    ) -> None:
        self.uri = uri
        self.name = name if name is not None else uri.rstrip("/").rpartition("/")[2] or uri
        self.title = title
        self.description = description
        self.mime_type = mime_type
        self.size = size

    def __repr__(self) -> str:
        return f"ResourceLink({self.uri!r})"

    def __eq__(self, other: object) -> bool:
        return type(other) is ResourceLink and other.to_block() == self.to_block()

    __hash__ = None  # type: ignore[assignment]

    def to_block(self) -> Block:
        return Block(
            "resource_link",
            uri=self.uri,
            name=self.name,
            title=self.title,
            description=self.description,
            mime_type=self.mime_type,
            size=self.size,
        )


class Message:
    """One message of a prompt. Several contents become several messages of that role."""

    __module__ = "callyard"
    __slots__ = ("content", "role")
    __callyard_advice__ = "only a function with @prompt returns messages, by themselves or in a list"

    def __init__(self, role: MessageRole, content: str | Content | Sequence[str | Content]) -> None:
        if role not in ("user", "assistant"):
            raise ValueError(f"role must be 'user' or 'assistant', got {role!r}")
        self.role = role
        self.content = content

    def __repr__(self) -> str:
        return f"Message({self.role!r}, {self.content!r})"

    def __eq__(self, other: object) -> bool:
        return type(other) is Message and (other.role, other.content) == (self.role, self.content)

    __hash__ = None  # type: ignore[assignment]


# --- what travels ---------------------------------------------------------------------------------------------------


class Block(msgspec.Struct, frozen=True, omit_defaults=True):
    """One content in its JSON form. `data` is base64 in JSON.

    | type | always | and, unless empty |
    | --- | --- | --- |
    | `text` | `text` | |
    | `image`, `audio` | `data`, `mime_type` | `name` |
    | `file` | `text` or `data`, `mime_type` | `name`, `uri` |
    | `resource_link` | `uri`, `name` | `title`, `description`, `mime_type`, `size` |

    A file has `text` when its type is one of text and its bytes are UTF-8. Raises `ValueError` for any other form.
    """

    type: BlockType
    text: str | None = None
    data: bytes | None = None
    mime_type: str = ""
    uri: str = ""
    name: str = ""
    title: str = ""
    description: str = ""
    size: int | None = None

    def __post_init__(self) -> None:
        has_text, has_data = self.text is not None, self.data is not None
        if self.type == "text":
            good = has_text and not has_data
        elif self.type == "resource_link":
            good = bool(self.uri and self.name) and not has_text and not has_data
        else:
            good = bool(self.mime_type) and has_data is not has_text and (has_data or self.type == "file")
        if not good:
            raise ValueError(f"a block of type {self.type} without what it needs, or with more")

    @property
    def base64(self) -> str:
        """`data` as text; of a text, its UTF-8."""
        return base64.b64encode(self.to_bytes()).decode()

    def to_bytes(self) -> bytes:
        """The content's own bytes; of a text, its UTF-8; of a link, none."""
        if self.data is not None:
            return self.data
        return (self.text or "").encode("utf-8", "surrogatepass")

    def to_content(self) -> Content | str:
        """What a function returned for it."""
        match self.type:
            case "text":
                return self.text or ""
            case "image":
                return Image(self.to_bytes(), self.mime_type, name=self.name)
            case "audio":
                return Audio(self.to_bytes(), self.mime_type, name=self.name)
            case "file":
                return File(self.to_bytes(), self.mime_type, name=self.name, uri=self.uri)
            case "resource_link":
                return ResourceLink(
                    self.uri,
                    self.name,
                    title=self.title,
                    description=self.description,
                    mime_type=self.mime_type,
                    size=self.size,
                )


class MessageBlock(msgspec.Struct, frozen=True):
    """One message of a prompt in its JSON form."""

    role: MessageRole
    content: Block


class _Contents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    blocks: list[Block] = msgspec.field(name=CONTENT_TAG)


class _Messages(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    messages: list[MessageBlock] = msgspec.field(name=MESSAGES_TAG)


_CONTENTS: Final = msgspec.json.Decoder(_Contents)
_MESSAGES: Final = msgspec.json.Decoder(_Messages)
_CONTENTS_START: Final = b'{"%s":' % CONTENT_TAG.encode()
_MESSAGES_START: Final = b'{"%s":' % MESSAGES_TAG.encode()


def read_contents(output: bytes | msgspec.Raw) -> list[Block] | None:
    """The contents that a tool or a resource returned; None: `output` is any other JSON.

    An executor may send anything, so what only looks like contents is other JSON too.
    """
    raw = bytes(output)
    if not raw.startswith(_CONTENTS_START):
        return None
    try:
        blocks = _CONTENTS.decode(raw).blocks
    except (msgspec.DecodeError, RecursionError):
        return None
    return blocks if len(blocks) <= BLOCKS_MAX else None


def read_messages(output: bytes | msgspec.Raw) -> list[MessageBlock] | None:
    """The messages that a prompt returned; None: `output` is any other JSON."""
    raw = bytes(output)
    if not raw.startswith(_MESSAGES_START):
        return None
    try:
        messages = _MESSAGES.decode(raw).messages
    except (msgspec.DecodeError, RecursionError):
        return None
    return messages if len(messages) <= BLOCKS_MAX else None


def read_returned(output: bytes | msgspec.Raw) -> Any:
    """What a function returned for this output: the one content, the list, the messages. None: any other JSON."""
    blocks = read_contents(output)
    if blocks is not None:
        contents = [block.to_content() for block in blocks]
        return contents[0] if len(contents) == 1 else contents
    messages = read_messages(output)
    if messages is None:
        return None
    return [Message(message.role, message.content.to_content()) for message in messages]


# --- encoding -------------------------------------------------------------------------------------------------------


NO_LIMIT: Final = 1 << 62


def encode_result(
    value: object,
    bytes_max: int,
    role: Role = "tool",
    mime_type: str = "",
    *,
    nan_null: bool = False,
    binary: bool = False,
) -> bytes:
    """The result of a function as JSON; with `binary` what is binary in it may stand beside it (`packing`).

    `mime_type`: of a resource, as it was declared. `nan_null`: NaN and infinities are null. Raises `ResultMisfit`.
    """
    encode = encode_crossing if binary and type(value) not in _LEAVES else encode_value
    contents: object = None
    if role == "prompt":
        contents = {MESSAGES_TAG: _to_messages(value)}
    elif role == "resource":
        contents = None if value is None else {CONTENT_TAG: _to_resource(value, mime_type)}
    elif type(value) not in _PLAIN:
        blocks = _find_contents(value)
        contents = None if blocks is None else {CONTENT_TAG: blocks}
    if contents is not None:  # JSON for whoever reads them
        value, encode = contents, encode_value
    return check_size(encode(value, nan_null=nan_null), bytes_max)


_LEAVES: Final = frozenset({str, int, float, bool, type(None)})
_PLAIN: Final = _LEAVES | {dict}


def _find_contents(value: object) -> list[Block] | None:
    """The blocks of a content, or of a list that holds one; None: it is none."""
    if isinstance(value, list | tuple):
        if not any(_is_content_type(kind) for kind in set(map(type, value))):
            return None
        return _to_blocks(value)
    content = _to_content(value)
    return None if content is None else [content.to_block()]


def _to_blocks(values: Sequence[object]) -> list[Block]:
    """Of contents and texts. Raises `ResultMisfit` for anything else between them."""
    if len(values) > BLOCKS_MAX:
        raise ResultMisfit(f"{len(values)} contents, expected at most {BLOCKS_MAX}", {"pointer": ""})
    blocks: list[Block] = []
    for index, value in enumerate(values):
        content = _to_content(value)
        if content is not None:
            blocks.append(content.to_block())
        elif isinstance(value, str):
            blocks.append(Block("text", text=str.__str__(value)))
        else:
            raise _misplaced(f"/{index}", "a list with a content holds contents and text only", value)
    return blocks


def _to_messages(value: object) -> list[MessageBlock]:
    values = value if isinstance(value, list | tuple) else [value]
    found: list[MessageBlock] = []
    for index, part in enumerate(values):
        role: MessageRole = "user"
        if isinstance(part, Message):
            role, part = part.role, part.content
        inner = part if isinstance(part, list | tuple) else [part]
        if not inner or not all(isinstance(one, str) or _is_content_type(type(one)) for one in inner):
            pointer = f"/{index}" if values is value else ""
            raise _misplaced(pointer, "a prompt returns text, a Message, a content, or a list of these", part)
        found += [MessageBlock(role, block) for block in _to_blocks(inner)]
    if len(found) > BLOCKS_MAX:
        raise ResultMisfit(f"{len(found)} messages, expected at most {BLOCKS_MAX}", {"pointer": ""})
    return found


def _to_resource(value: object, mime_type: str) -> list[Block]:
    """Files only: a resource is read, so what it is made of has bytes."""
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        return [_file_block(data, mime_type or sniff_mime_type(data) or _guess_plain(data))]
    if isinstance(value, str):
        return [_file_block(value, mime_type or "text/plain")]
    blocks = _find_contents(value)
    if blocks is None:
        return [_file_block(encode_value(value), mime_type or "application/json")]
    for index, block in enumerate(blocks):
        if block.type == "resource_link":
            raise _misplaced(f"/{index}", "a resource returns what is in it, not a link", value)
    return [
        block
        if block.type == "file"
        else Block(
            "file",
            text=block.text,
            data=block.data,
            mime_type=block.mime_type or mime_type or "text/plain",
            name=block.name,
        )
        for block in blocks
    ]


def _misplaced(pointer: str, expected: str, value: object) -> ResultMisfit:
    text = f"{expected}, got {type_name(value)}"
    return ResultMisfit(f"{pointer}: {text}" if pointer else text, {"pointer": pointer, "type": type_name(value)})


def _to_content(value: object) -> Content | None:
    if isinstance(value, Content):
        return value
    return Image(value) if _is_drawing_type(type(value)) else None


def _is_content_type(kind: type) -> bool:
    return issubclass(kind, Content) or _is_drawing_type(kind)


# --- pictures of other libraries, which this one never imports --------------------------------------------------------


def _is_drawing_type(kind: type) -> bool:
    return _is_of(kind, "PIL.Image", "Image") or _is_of(kind, "matplotlib.figure", "Figure")


def _is_of(kind: type, module: str, name: str) -> bool:
    loaded = sys.modules.get(module)
    base = getattr(loaded, name, None)
    return isinstance(base, type) and issubclass(kind, base)


def _draw(value: Any) -> bytes | None:
    """PNG of a PIL image or a matplotlib figure; None: it is neither."""
    kind = type(value)
    buffer = io.BytesIO()
    if _is_of(kind, "PIL.Image", "Image"):
        value = value if value.mode in _PNG_MODES else value.convert("RGB")
        value.save(buffer, format="PNG")
    elif _is_of(kind, "matplotlib.figure", "Figure"):
        value.savefig(buffer, format="png")
    else:
        return None
    return buffer.getvalue()


_PNG_MODES: Final = frozenset({"1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA"})


# --- what bytes are -------------------------------------------------------------------------------------------------

_TYPES: Final[Mapping[str, str]] = {
    "image/png": "png",
    "image/jpeg": "jpg jpeg",
    "image/gif": "gif",
    "image/webp": "webp",
    "image/svg+xml": "svg",
    "image/bmp": "bmp",
    "image/x-icon": "ico",
    "image/avif": "avif",
    "image/tiff": "tif tiff",
    "audio/wav": "wav",
    "audio/mpeg": "mp3",
    "audio/ogg": "ogg oga opus",
    "audio/flac": "flac",
    "audio/mp4": "m4a",
    "audio/aac": "aac",
    "video/mp4": "mp4",
    "video/webm": "webm",
    "video/quicktime": "mov",
    "text/plain": "txt log",
    "text/markdown": "md",
    "text/csv": "csv",
    "text/tab-separated-values": "tsv",
    "text/html": "html htm",
    "text/css": "css",
    "text/javascript": "js",
    "text/x-python": "py",
    "application/json": "json",
    "application/jsonl": "jsonl ndjson",
    "application/xml": "xml",
    "application/yaml": "yaml yml",
    "application/toml": "toml",
    "application/pdf": "pdf",
    "application/zip": "zip",
    "application/gzip": "gz",
    "application/x-tar": "tar",
    "application/vnd.apache.parquet": "parquet",
    "application/vnd.sqlite3": "sqlite",
    "application/vnd.openxmlformats-officedocument.wordprocessingml.document": "docx",
    "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet": "xlsx",
    "application/vnd.openxmlformats-officedocument.presentationml.presentation": "pptx",
}
"""A table of our own: that of the machine would make the type of a file depend on where a function runs."""
_EXTENSIONS: Final = {extension: kind for kind, extensions in _TYPES.items() for extension in extensions.split()}
_BEGINNINGS: Final[tuple[tuple[int, bytes, str], ...]] = (
    (0, b"\x89PNG\r\n\x1a\n", "image/png"),
    (0, b"\xff\xd8\xff", "image/jpeg"),
    (0, b"GIF8", "image/gif"),
    (8, b"WEBP", "image/webp"),
    (8, b"WAVE", "audio/wav"),
    (4, b"ftypavif", "image/avif"),
    (4, b"ftypM4A", "audio/mp4"),
    (4, b"ftyp", "video/mp4"),
    (0, b"BM", "image/bmp"),
    (0, b"II*\x00", "image/tiff"),
    (0, b"MM\x00*", "image/tiff"),
    (0, b"<svg", "image/svg+xml"),
    (0, b"ID3", "audio/mpeg"),
    (0, b"\xff\xfb", "audio/mpeg"),
    (0, b"OggS", "audio/ogg"),
    (0, b"fLaC", "audio/flac"),
    (0, b"%PDF-", "application/pdf"),
    (0, b"PK\x03\x04", "application/zip"),
    (0, b"\x1f\x8b", "application/gzip"),
)
_TEXTUAL: Final = frozenset(
    {
        *("application/json", "application/jsonl", "application/xml", "application/yaml", "application/toml"),
        *("application/javascript", "application/sql", "application/x-sh", "image/svg+xml"),
    }
)


def sniff_mime_type(data: bytes, name: str = "") -> str:
    """The type by a file's name, else by how its bytes begin; empty: neither says."""
    dot = name.rpartition(".")
    by_name = _EXTENSIONS.get(dot[2].lower(), "") if dot[1] else ""
    if by_name:
        return by_name
    return next((kind for at, magic, kind in _BEGINNINGS if data.startswith(magic, at)), "")


def extension_of(mime_type: str) -> str:
    """`.png` for `image/png`; a type of no known extension: `.bin`."""
    kind = mime_type.partition(";")[0].strip().lower()
    found = _TYPES.get(kind, "").partition(" ")[0]
    return f".{found}" if found else ".txt" if kind.startswith("text/") else ".bin"


def is_textual(mime_type: str) -> bool:
    """Whether bytes of this type are text."""
    kind = mime_type.partition(";")[0].strip().lower()
    return kind.startswith("text/") or kind in _TEXTUAL or kind.endswith(("+json", "+xml", "+yaml"))


def _guess_plain(data: bytes) -> str:
    """For bytes that nothing is known of."""
    if b"\x00" in data:
        return "application/octet-stream"
    try:
        data.decode()
    except UnicodeDecodeError:
        return "application/octet-stream"
    return "text/plain"


def _file_block(source: bytes | str, mime_type: str, *, name: str = "", uri: str = "") -> Block:
    if isinstance(source, str):
        return Block("file", text=str.__str__(source), mime_type=mime_type, name=name, uri=uri)
    if is_textual(mime_type):
        try:
            return Block("file", text=source.decode(), mime_type=mime_type, name=name, uri=uri)
        except UnicodeDecodeError:
            pass  # another encoding: its bytes say it all
    return Block("file", data=source, mime_type=mime_type, name=name, uri=uri)


def _read_source(source: Source, who: str) -> tuple[bytes, str]:
    """The bytes, and the name of the file they come from. A text is a path, never the content."""
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source), ""
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        return path.read_bytes(), path.name
    raise TypeError(f"{who} takes bytes or the path of a file, got {type(source).__name__}")
