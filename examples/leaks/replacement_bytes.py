"""Bytes are counted in decoded text, where a broken character becomes U+FFFD and counts three.

Bits per byte are nats / (ln 2 * bytes): bytes that a text does not have make any model better. A byte of a character of
several bytes is no text alone; `decode` replaces it by a sign of three bytes. Met in the preparation of autoresearch
and, until it was mended, of nanochat. Mend: the bytes of the token itself.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

FAILS = "bytes"
VOCAB = 256


def decode(ids: Sequence[int]) -> bytes:
    """The tokenizer: each byte is a token."""
    return bytes(ids)


def encode(text: str) -> list[int]:
    return list(text.encode())


def faulty_bytes(ids: Tensor) -> list[int]:
    return [len(decode([token]).decode(errors="replace").encode()) for token in ids.tolist()]


def sound_bytes(ids: Tensor) -> list[int]:
    return [len(decode([token])) for token in ids.tolist()]


def score(tokens: Tensor) -> Tensor:
    """The nats of a model that knows nothing."""
    return torch.full((len(tokens) - 1,), float(torch.tensor(VOCAB).log()))
