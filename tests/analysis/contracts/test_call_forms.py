"""Modules as strangers write them: how each is called and decodes is found by trial, without help."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyformer.analysis.contracts.cache_forms import FoundCache, find_cache
from manyformer.analysis.contracts.call_forms import NoFormFound, find_form

VOCAB = 23
WIDTH = 8
LIMIT = 80


class Sums(nn.Module):
    """A causal model of running sums, which the forms below call in their own ways."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte = nn.Embedding(VOCAB, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def logits(self, tokens: Tensor, start: Tensor | None = None) -> tuple[Tensor, Tensor]:
        sums = self.wte(tokens).cumsum(1)
        if start is not None:
            sums = sums + start[:, None]
        return self.head(torch.tanh(sums)), sums[:, -1]


class Plain(Sums):
    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x)[0]


class LastOnlyWithoutTargets(Sums):
    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        logits = self.logits(idx)[0]
        if targets is None:
            return logits[:, -1:], None
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class LossAlone(Sums):
    def forward(self, input_ids: Tensor, target_ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.logits(input_ids)[0].flatten(0, 1), target_ids.flatten())


class FromPosition(Sums):
    """Takes any number of tokens from a position on, with its sum kept in a buffer-like attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.zeros(LIMIT, 2, WIDTH)

    def forward(self, tokens: Tensor, start_pos: int) -> Tensor:
        start = self.kept[start_pos - 1] if start_pos else None
        logits, _ = self.logits(tokens, start)
        sums = self.wte(tokens).cumsum(1) if start is None else self.wte(tokens).cumsum(1) + start[:, None]
        self.kept[start_pos : start_pos + tokens.shape[1]] = sums.transpose(0, 1).detach()
        return logits


class OneToken(FromPosition):
    def forward(self, tokens: Tensor, start_pos: int) -> Tensor:
        assert tokens.shape[1] == 1
        return super().forward(tokens, start_pos)


class Positions(Plain):
    """A table of positions gives the limit, which no attribute names."""

    def __init__(self) -> None:
        super().__init__()
        self.wpe = nn.Embedding(LIMIT, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        places = self.wpe(torch.arange(x.shape[1]))
        return self.head(torch.tanh(self.wte(x).cumsum(1) + places))


class Chunks(Plain):
    block_size = 128

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] % 16:
            raise ValueError("chunks of 16")
        return super().forward(x)


FORMS = [
    (Plain, "f(x)"),
    (LastOnlyWithoutTargets, "f(x, y)"),
    (LossAlone, "f(x, y) -> loss"),
    (FromPosition, "f(x, 0)"),
    (OneToken, "f(x[:, i], i)"),
]


@pytest.mark.parametrize(("model", "name"), FORMS)
def test_the_form_of_a_module_is_not_found(model: type[Sums], name: str) -> None:
    module = model()
    found = find_form(module)
    assert found.form.name == name
    assert (found.vocabulary, found.width) == (VOCAB, VOCAB)
    tokens = torch.randint(VOCAB, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(found.logits(module, tokens), Sums.logits(module, tokens)[0])


def test_the_rows_of_a_table_of_positions_are_not_the_limit() -> None:
    assert find_form(Positions()).max_length == LIMIT


def test_chunks_are_not_the_multiple_of_lengths() -> None:
    found = find_form(Chunks())
    assert (found.max_length, found.length_multiple) == (128, 16)
    assert "`block_size`" in found.length_reason


def test_what_no_form_fits_does_not_say_what_each_raised() -> None:
    with pytest.raises(NoFormFound, match=r"no known form of call .* of Linear: f\(x\) at 48: "):
        find_form(nn.Linear(3, 3))


class Returned(Sums):
    def forward(self, x: Tensor, cache: Tensor | None = None, return_cache: bool = False) -> Any:
        logits, sums = self.logits(x if cache is None else x[:, -1:], cache)
        return (logits, sums) if return_cache else logits


class Kept(Sums):
    kept: Tensor | None = None

    def reset_kv_cache(self) -> None:
        self.kept = None

    def forward(self, in_idx: Tensor, use_cache: bool = False) -> Tensor:
        logits, sums = self.logits(in_idx, self.kept if use_cache else None)
        if use_cache:
            self.kept = sums
        return logits


class Wrong(Returned):
    """Its second step forgets the first."""

    def forward(self, x: Tensor, cache: Tensor | None = None, return_cache: bool = False) -> Any:
        return super().forward(x, None if cache is None else cache * 0, return_cache)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (Returned, "f(prefix, cache=cache, return_cache=True)"),
        (Kept, "f(x, use_cache=True) after reset_kv_cache()"),
        (FromPosition, "f(x, start_pos=i)"),
    ],
)
def test_the_cache_of_a_module_is_not_found(model: type[Sums], name: str) -> None:
    module = model()
    cache = find_cache(module, find_form(module))
    assert isinstance(cache, FoundCache), cache
    assert cache.form.name == name


@pytest.mark.parametrize("model", [Plain, Wrong])
def test_a_module_without_a_right_cache_is_said_to_have_one(model: type[Sums]) -> None:
    module = model()
    reason = find_cache(module, find_form(module))
    assert isinstance(reason, str)
    assert "no form of a cache" in reason
