"""Losses between layers: what they are, and when they end."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyformer as mf
from manyformer.models import ClassHead, LanguageModel, TokenEmbedding
from manyformer.models.auxiliary_losses import LayerwiseNextTokenLoss, targets_two_ahead
from manyformer.nn import Attention, SoftmaxKernel
from manyformer.nn.batches import IGNORE_INDEX, CausalLMBatch
from manyformer.nn.core import PADDING_SEGMENT, Chain
from manyformer.nn.masks import Causal
from manyformer.nn.positions import LearnedPosition, LearnedQKPosition, PositionLayer
from manyformer.nn.runtime.training_hooks import set_training_progress

SMALL: dict[str, Any] = {"vocab": 11, "dim": 8, "depth": 4, "heads": 2, "max_length": 12, "dropout": 0.0}


@pytest.mark.parametrize(
    ("share", "left"),
    [(0.0, [0, 1, 2]), (0.12, [0, 1, 2]), (0.125, [1, 2]), (0.3, [2]), (0.375, []), (0.5, []), (1.0, [])],
)
def test_layer_l_of_n_ends_after_l_in_2n_of_the_training(share: float, left: list[int]) -> None:
    targets = LayerwiseNextTokenLoss(4, 5, 4)
    set_training_progress(nn.Sequential(targets), share)
    assert targets.active_layers() == left


def test_the_target_two_ahead_stays_in_its_document() -> None:
    targets = torch.tensor([[4, 5, 6, 7, 8], [4, 5, IGNORE_INDEX, 7, 8]])
    segments, one = torch.tensor([[0, 0, 1, 1, PADDING_SEGMENT], [0] * 5]), torch.zeros(2, 5, dtype=torch.long)
    x = IGNORE_INDEX
    assert targets_two_ahead(targets, one).tolist() == [[5, 6, 7, 8, x], [5, x, 7, 8, x]]
    assert targets_two_ahead(targets, segments).tolist() == [[5, x, 7, x, x], [5, x, 7, 8, x]]


def mean(head: nn.Module, x: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    return F.cross_entropy(
        head(x).flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, label_smoothing=smoothing
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("share", [0.0, 0.2, 0.9])
def test_the_extra_loss_is_the_sum_of_the_paper(share: float, norm: str, smoothing: float) -> None:
    model: Any = mf.build("deep-char-lm", **SMALL, norm_order=norm)
    set_training_progress(model, share)
    tokens = torch.randint(0, 11, (2, 9))
    targets = torch.where(torch.rand(2, 9) < 0.2, IGNORE_INDEX, tokens.roll(-1, 1))
    segments = torch.tensor([[0] * 4 + [1] * 5, [PADDING_SEGMENT] * 2 + [0] * 7])
    seen: dict[str, Tensor] = {}
    for number in range(4):
        layer = model.body.get_submodule(str(number))
        layer.register_forward_hook(lambda _, __, out, number=number: seen.update({str(number): out.y}))
    loss = model.loss(CausalLMBatch(tokens, targets, segments), label_smoothing=smoothing)
    deep, later = model.auxiliary, targets_two_ahead(targets, segments)
    last = seen["3"] if norm == "post" else model.body.get_submodule("norm").inner(seen["3"])
    expected = 0.5 * mean(deep.ahead[3], last, later, smoothing)
    for number in range(3):
        if share < (number + 1) / 8:
            expected = expected + mean(deep.next[number], seen[str(number)], targets, smoothing)
            expected = expected + 0.5 * mean(deep.ahead[number], seen[str(number)], later, smoothing)
    torch.testing.assert_close(loss.extra, expected)
    main = mean(model.head, last, targets, smoothing) * (targets != IGNORE_INDEX).sum()
    torch.testing.assert_close(loss.total, main)


def test_silent_classifiers_have_a_gradient_of_zero() -> None:
    """Several processes would wait for it otherwise."""
    model: Any = mf.build("deep-char-lm", **SMALL, norm_order="pre")
    set_training_progress(model, 0.2)
    tokens = torch.randint(0, 11, (2, 9))
    model.loss(CausalLMBatch(tokens, tokens.roll(-1, 1))).extra.backward()
    for number in range(3):
        for weight in [*model.auxiliary.next[number].parameters(), *model.auxiliary.ahead[number].parameters()]:
            assert weight.grad is not None
            assert bool(weight.grad.any()) == (number > 0)


def test_classifiers_between_layers_are_not_needed_to_predict() -> None:
    model: Any = mf.build("deep-char-lm", **SMALL).eval()
    tokens = torch.randint(0, 11, (2, 9))
    before = model(tokens).logits
    for value in model.auxiliary.parameters():
        nn.init.zeros_(value)
    assert torch.equal(model(tokens).logits, before)
    assert model(tokens).loss == 0.0


def test_sizes_of_the_published_models() -> None:
    """44 million parameters of which 41 predict, and 235 of which 219: table 2 of the paper rounds."""
    for depth, everything, predicting in ((12, 44, 41), (64, 235, 219)):
        with torch.device("meta"):
            model: Any = mf.build("deep-char-lm", depth=depth)
        count = sum(p.numel() for p in model.parameters())
        aside = sum(p.numel() for p in model.auxiliary.parameters())
        assert abs(count / 1e6 - everything) < 1
        assert abs((count - aside) / 1e6 - predicting) < 1


def test_every_layer_has_its_own_positions() -> None:
    model: Any = mf.build("deep-char-lm", **SMALL).eval()
    assert model.max_length == 12
    tables = [m.position.weight for m in model.modules() if isinstance(m, PositionLayer | TokenEmbedding)]
    assert len({id(table) for table in tables}) == 4
    tokens = torch.zeros(1, 6, dtype=torch.long)
    for table in tables[1:]:
        nn.init.zeros_(table)
    before = model(tokens).logits
    for table in tables:
        with torch.no_grad():
            table[3] += 1.0
        after = model(tokens).logits
        assert torch.equal(after[:, :3], before[:, :3])
        assert (after[:, 3] - before[:, 3]).abs().max() > 1e-3
        before = after


def test_a_stack_that_shows_no_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="auxiliary losses need the layers of a Chain, and a PositionLayer has none"):
        LanguageModel(
            TokenEmbedding(5, 4),
            PositionLayer(LearnedPosition(4, 3)),
            ClassHead(4, 5),
            auxiliary=LayerwiseNextTokenLoss(4, 5, 2),
        )


def test_the_fewest_positions_of_all_parts_count() -> None:
    attention = Attention(8, 2, SoftmaxKernel(Causal()), position=LearnedQKPosition(2, 4, 6))
    model = LanguageModel(TokenEmbedding(5, 8), Chain(one=attention), ClassHead(8, 5))
    assert model.max_length == 6
    with pytest.raises(ValueError, match="7 tokens are more than this model allows"):
        model(torch.zeros(1, 7, dtype=torch.long))
