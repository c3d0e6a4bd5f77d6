"""Text of files and their names in a form that neither controls a terminal nor breaks the lines of a file."""

import re

# controls of terminals, line separators, overrides of the writing direction, and bytes of names that are not UTF-8
_CONTROLS = "\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_IN_TEXT = re.compile(f"[{_CONTROLS}]")
_IN_LINE = re.compile(f"[\t\n{_CONTROLS}]")


def printable(text: str) -> str:
    """The text with control characters as in JSON, such as \\u001b; line breaks and tabs stay."""
    return _IN_TEXT.sub(_escape, text)


def printable_line(text: str) -> str:
    """The text as one line, in which line breaks and tabs are escaped as well."""
    return _IN_LINE.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"
