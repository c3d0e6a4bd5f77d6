"""What bytes are that are not UTF-8 text: another encoding of text, or a binary format, with the remedy."""

import codecs
import re
import shlex

from manyformer.errors import UserError

HEAD_BYTES = 4096
"""The number of bytes from the beginning of a file that show what it is."""

# UTF-32 first: its mark begins with that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_BINARY_FORMATS = (
    (b"PK\x03\x04", "a zip archive or a document in one; extract its text"),
    (b"%PDF", "a PDF document; extract its text"),
    (b"\x89PNG", "a PNG image; data.kind=images reads images"),
    (b"\xff\xd8\xff", "a JPEG image; data.kind=images reads images"),
    (b"BZh", "a bzip2 archive; unpack it with bunzip2"),
    (b"\xfd7zXZ", "an xz archive; unpack it with unxz"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive; unpack it with unzstd"),
    (b"7z\xbc\xaf", "a 7z archive; unpack it"),
    (b"PAR1", "a Parquet file; convert it to JSONL, or load it as a data set of hf:"),
    (b"\x93NUMPY", "a NumPy array; data.kind=images reads images in .npz"),
    (b"SQLite format 3", "a database; export its text"),
)
_MIN_SAMPLE = 16
_CONTROL_CHARACTER = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")


def describe_bytes(head: bytes, name: str) -> str:
    """What the file `name`, which is not UTF-8 text, looks like by its first bytes, and what to do."""
    for mark, encoding in _MARKS:
        if head.startswith(mark):
            return _conversion(encoding, name)
    for signature, description in _BINARY_FORMATS:
        if head.startswith(signature):
            return f"this is {description}"
    if b"\0" in head:
        # the letters of most scripts have a zero as one of their two bytes
        shares = [head[start::2].count(0) / max(1, len(head[start::2])) for start in (0, 1)]
        if len(head) >= _MIN_SAMPLE and max(shares) > 0.4 and min(shares) < 0.1:
            return _conversion("utf-16be" if shares[0] > shares[1] else "utf-16le", name)
        return "this is binary data, not text"
    if _CONTROL_CHARACTER.search(head):
        return "this is binary data or text in an encoding that mixes in control characters, not UTF-8 text"
    return f"if it is text, convert it, for instance `iconv -f latin1 -t utf-8 {_shell_name(name)}`"


def _shell_name(name: str) -> str:
    return shlex.quote(name.removesuffix(".gz"))


def _conversion(encoding: str, name: str) -> str:
    title = encoding[:6].upper()
    return f"it looks like {title}; convert it with `iconv -f {encoding} -t utf-8 {_shell_name(name)}`"


def decode_text(data: bytes, location: str, name: str, head: bytes | None = None) -> str:
    """UTF-8 text without a byte order mark. Raises UserError with the location of other bytes, also of NUL.

    `head` are the first bytes of the file `name`, if `data` is from its middle.
    """
    try:
        text = data.decode("utf-8-sig")
        position = data.find(0)
        if position < 0:
            return text
    except UnicodeDecodeError as error:
        position = error.start
    raise not_text_error(location, name, data[:HEAD_BYTES] if head is None else head, position, data[position])


def not_text_error(location: str, name: str, head: bytes, position: int, byte: int) -> UserError:
    """The error for a byte that is not UTF-8, or is NUL, in the file `name` that begins with `head`."""
    if byte:
        problem = f"not UTF-8 at byte {position} (0x{byte:02x})"
    else:
        problem = f"a NUL byte at byte {position}"
    is_late = not byte and 0 not in head
    if is_late:
        meaning = "text has none: the file is damaged or binary data"
    else:
        meaning = describe_bytes(head, name)
    return UserError(f"{location}: {problem}; {meaning}")
