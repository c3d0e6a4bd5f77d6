"""GPT-2's alphabet, in which each byte is a printable character."""

from functools import cache


@cache
def byte_of_character() -> dict[str, int]:
    """From GPT-2's printable characters for bytes to the bytes.

    A printable Latin-1 byte maps to itself, the remaining ones to code points from 256 on, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    remaining = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + offset): byte for offset, byte in enumerate(remaining)}
