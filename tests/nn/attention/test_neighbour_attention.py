"""SPALM: the gate at its limits, one neighbour, equal neighbours, and where gradients go."""

import pytest
import torch
from torch import Tensor

import manyformer as mf
from manyformer.models import LanguageModel
from manyformer.nn.batches import NO_NEIGHBOUR, CausalLMBatch

VOCAB, DIM = 23, 16
SMALL = {"vocab": VOCAB, "dim": DIM, "depth": 2, "heads": 2, "ff_dim": 24, "dropout": 0.0}


def model_of(recipe: str = "spalm", **keywords: object) -> LanguageModel:
    torch.manual_seed(0)
    model = mf.build(recipe, **(SMALL | keywords)).double().eval()
    assert isinstance(model, LanguageModel)
    return model


def drawn(k: int = 3, length: int = 7) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(5, VOCAB, (2, length), generator=generator)
    return tokens, torch.randint(5, VOCAB, (2, length, k), generator=generator)


def biased(model: LanguageModel, bias: float) -> LanguageModel:
    with torch.no_grad():
        model.body.get_submodule("recall.gate").bias.fill_(bias)
    return model


def test_by_the_definition() -> None:
    model, (tokens, neighbours) = biased(model_of(), 0.3), drawn()
    neighbours[0, 2, 1] = neighbours[1, 4] = NO_NEIGHBOUR
    # a token like others: that of no word in many vocabularies, "!" in GPT-2's
    neighbours[0, 3, 0] = 0
    actual = model(tokens, neighbours=neighbours).logits
    hidden, gate = model.hidden(tokens).y, model.body.get_submodule("recall.gate")
    words = model.embed.token.weight
    for row in range(2):
        for column in range(7):
            h = hidden[row, column]
            known = [words[t] for t in neighbours[row, column].tolist() if t != NO_NEIGHBOUR]
            z = h
            if known:
                y = torch.stack(known)
                g = torch.sigmoid(h @ gate.weight[0] + gate.bias[0])
                z = g * h + (1 - g) * ((y @ h).softmax(0) @ y)
            torch.testing.assert_close(actual[row, column], words @ z, rtol=1e-10, atol=1e-12)


def test_an_open_gate_is_transformer_xl() -> None:
    model, (tokens, neighbours) = biased(model_of(), 1e4), drawn()
    plain = model_of("transformer-xl")
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if "recall" not in name})
    expected = plain(tokens).logits
    torch.testing.assert_close(model(tokens, neighbours=neighbours).logits, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(model(tokens).logits, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(model(tokens, neighbours=torch.full_like(neighbours, NO_NEIGHBOUR)).logits, expected)


@pytest.mark.parametrize("k", [1, 4])
def test_a_shut_gate_says_the_neighbour(k: int) -> None:
    model, (tokens, neighbours) = biased(model_of(), -1e4), drawn(1)
    # as often as you like
    actual = model.hidden(tokens, neighbours=neighbours.expand(-1, -1, k)).y
    torch.testing.assert_close(actual, model.embed.token(neighbours[..., 0]), rtol=1e-10, atol=1e-12)


def test_gradients_reach_the_words_through_the_neighbours() -> None:
    model, (tokens, neighbours) = model_of(), drawn()
    tokens, neighbours = tokens.clamp(max=15), neighbours.clamp(min=16)
    targets = tokens.roll(-1, 1)
    model.loss(CausalLMBatch(tokens, targets, None, neighbours)).total.backward()
    assert all(weight.grad is not None and weight.grad.any() for weight in model.parameters())
    with_them = model.embed.token.weight.grad
    assert with_them is not None
    before = with_them.clone()
    model.zero_grad()
    model.loss(CausalLMBatch(tokens, targets)).total.backward()
    assert not torch.equal(before[16:], model.embed.token.weight.grad[16:])  # type: ignore[index]


def test_a_state_goes_on_with_neighbours() -> None:
    model, (tokens, neighbours) = model_of(), drawn()
    state, parts = model.init_state(2), []
    for begin, end in ((0, 3), (3, 4), (4, 7)):
        out = model(tokens[:, begin:end], None, state, neighbours=neighbours[:, begin:end])
        state = out.state
        parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens, neighbours=neighbours).logits, rtol=1e-10, atol=1e-12)


def test_a_model_that_takes_nothing_refuses() -> None:
    tokens, neighbours = drawn()
    with pytest.raises(ValueError, match="this model does not use retrieved tokens"):
        model_of("transformer-xl")(tokens, neighbours=neighbours)
