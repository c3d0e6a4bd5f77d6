"""What a parameter for padding or documents means is found by trial, in modules that strangers could write."""

import pytest
import torch
import torch.nn.functional as F
from strange_models import FORMS, Config, Masked
from torch import Tensor, nn

import manyformer as mf
from manyformer.analysis.contracts.call_forms import find_form
from manyformer.analysis.contracts.mask_forms import FoundMasks, find_masks
from manyformer.nn.model_inputs import PADDING_SEGMENT


class PaddingIsTrue(Masked):
    """As torch's own layers have it."""

    def forward(self, tokens: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        valid = None if key_padding_mask is None else ~key_padding_mask
        return self.run(tokens, valid=valid)[0]


class Integers(Masked):
    """A mask that is multiplied with, which booleans cannot be here."""

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        valid = None
        if mask is not None:
            valid = (1 - mask) == 0
        return self.run(tokens, valid=valid)[0]


class Unused(Masked):
    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return self.run(tokens)[0]


class KindsOfText(Masked):
    """Numbers of segments that are looked up, as a kind of text, and divide nothing."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.types = nn.Embedding(2, config.n_embd)

    def forward(self, tokens: Tensor, segment_ids: Tensor | None = None) -> Tensor:  # type: ignore[override]
        segments = torch.zeros_like(tokens) if segment_ids is None else segment_ids
        return F.linear(self.wte(tokens).cumsum(1) + self.types(segments), self.head.weight)


class GivenPositions(Masked):
    """Positions that the caller may count."""

    def forward(  # type: ignore[override]
        self, tokens: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        places = torch.arange(tokens.shape[1]) if position_ids is None else position_ids
        x = self.wte(tokens) + self.wpe(places)
        if attention_mask is not None:
            x = x * attention_mask[..., None]
        return self.head(x.cumsum(1))


class Chunks(Masked):
    """Sums within chunks of 8 columns: padding on the left moves tokens to other chunks."""

    hidden = 1.0

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        x = self.wte(tokens)
        if mask is not None:
            x = x * (1 - self.hidden * ~mask[..., None])
        padded = F.pad(x, (0, 0, 0, -x.shape[1] % 8))
        return self.head(padded.unflatten(1, (-1, 8)).cumsum(2).flatten(1, 2)[:, : x.shape[1]])


class ShownPadding(Chunks):
    """A tenth of what should be hidden is seen."""

    hidden = 0.9


def masks_of(form: type[Masked]) -> FoundMasks:
    torch.manual_seed(0)
    module = form(Config()).eval()
    return find_masks(module, find_form(module))


@pytest.mark.parametrize(
    ("form", "name", "mask_type"),
    [
        (Masked, "attention_mask", "valid"),
        (PaddingIsTrue, "key_padding_mask", "padding"),
        (Integers, "mask", "valid as integers"),
    ],
)
def test_what_a_mask_holds_is_not_found(form: type[Masked], name: str, mask_type: str) -> None:
    masks = masks_of(form)
    assert (masks.padding, masks.mask_type) == (name, mask_type)
    assert masks.documents is None


def test_a_mask_that_changes_nothing_counts_as_one() -> None:
    masks = masks_of(Unused)
    assert masks.padding is None
    assert masks.padding_reason == "its attention_mask changes nothing"


def test_kinds_of_text_are_taken_for_documents() -> None:
    masks = masks_of(KindsOfText)
    assert masks.documents is None
    assert "its segment_ids holds no numbers of documents" in masks.documents_reason


def test_documents_are_not_numbered_from_zero_on_with_padding_as_one_of_them() -> None:
    masks = masks_of(FORMS["Packed"])
    assert masks.documents == "segment_ids"
    segments = torch.tensor([[3, 3, 7, PADDING_SEGMENT]])
    assert masks.options(segments)["segment_ids"].tolist() == [[1, 1, 2, 0]]


def test_positions_are_counted_beside_padding_by_nobody() -> None:
    masks = masks_of(GivenPositions)
    assert masks.positions == "position_ids"
    segments = torch.tensor([[PADDING_SEGMENT, PADDING_SEGMENT, 3, 3]])
    assert masks.options(segments)["position_ids"].tolist() == [[0, 1, 0, 1]]


@pytest.mark.parametrize(("form", "verdict"), [(Chunks, "passed"), (ShownPadding, "failed")])
def test_chunks_at_fixed_columns_count_as_padding_that_is_seen(form: type[Masked], verdict: str) -> None:
    torch.manual_seed(0)
    row = mf.check(form(Config()).eval(), only=["padding-left"])["padding-left"]
    assert row.verdict == verdict, row.sentence
