"""The tokenizer of data that is no text: none."""

from collections.abc import Iterable
from typing import Any, NoReturn, final

from manyformer.data.tokenizer import NativeTokenizer
from manyformer.errors import UserError


@final
class NoTokenizer(NativeTokenizer):
    """Stands where data has no tokens, such as the observations of an environment. Raises UserError for any text."""

    kind = "none"

    @property
    def vocab(self) -> int:
        return 0

    def encode_array(self, text: str) -> NoReturn:
        raise UserError("this model reads no text: it was trained on data without tokens")

    def token_bytes(self, token: int) -> NoReturn:
        raise UserError("this model writes no text: it was trained on data without tokens")

    def content(self) -> dict[str, Any]:
        return {}

    @classmethod
    def restore(cls, content: dict[str, Any]) -> "NoTokenizer":
        return cls()

    @classmethod
    def learn(cls, texts: Iterable[str], size: int | None) -> NoReturn:
        raise UserError("the tokenizer 'none' is for data without tokens; it cannot be learned from text")
