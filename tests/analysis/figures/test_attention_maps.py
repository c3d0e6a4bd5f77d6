"""What models look at: the weights that are told are those that they use, and each finds its tokens."""

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import manyformer as mf
from manyformer.analysis.figures.attention_maps import (
    AttentionMap,
    attention_maps,
    describe_map,
    draw_maps,
    row_shares,
    select_map,
)
from manyformer.base.errors import UserError
from manyformer.data.tokenizers.saved_tokenizers import train_tokenizer
from perturbing import perturb

TEXT = "abcdabcdefgh abc"
SMALL: dict[str, Any] = {"dim": 16, "depth": 2, "heads": 2}
PAIR = {"transformer": SMALL, "bahdanau": {"dim": 8, "embedding_dim": 6, "align_dim": 5, "maxout": 4}}
OVER_SOURCE = {"transformer": ["decoder.0.cross", "decoder.1.cross"], "bahdanau": ["decoder"]}


def built(name: str, **keywords: Any) -> Any:
    words = train_tokenizer("char", [TEXT])
    model = mf.build(name, vocab=words.vocab, **keywords)
    perturb(model, 0.3)
    model.tokenizer = words
    return model


@pytest.mark.parametrize("answer", ["ab", "abcd", None], ids=["shorter", "as long", "its own"])
@pytest.mark.parametrize("name", PAIR)
def test_an_encoder_decoder_looks_at_its_source(name: str, answer: str | None) -> None:
    model = built(name, **PAIR[name])
    actual = attention_maps(model, "abcd", answer)
    crossing = [one for one in actual if one.is_cross_attention]
    assert [one.part for one in crossing] == OVER_SOURCE[name]
    for one in crossing:
        assert one.columns == ("a", "b", "c", "d", "<eos>")
        assert one.rows[-1] == "<eos>"
        assert answer is None or one.rows[:-1] == tuple(answer)
        torch.testing.assert_close(one.weights.sum(-1), torch.ones(one.weights.shape[:2]))
    own = [one.part for one in actual if not one.is_cross_attention]
    parts = ["encoder.0.attention", "encoder.1.attention", "decoder.0.attention", "decoder.1.attention"]
    assert own == (parts if name == "transformer" else [])


def test_the_alignment_is_what_the_decoder_takes_its_context_from() -> None:
    model = built("bahdanau", **PAIR["bahdanau"])
    [one] = attention_maps(model, "abcd", "abcd")
    words, decoder = model.tokenizer, model.decoder
    source, target = torch.tensor([[*words.encode("abcd"), 2]]), torch.tensor([[1, *words.encode("abcd")]])
    memory, state = model.encode(source), model.init_state(1)
    for i in range(target.shape[1]):
        energies = decoder.score(state.body.hidden[:, None] if i else first(model, memory), memory.y)
        torch.testing.assert_close(one.weights[0, i], energies.softmax(-1)[0, 0])
        state = model.decode(target[:, i : i + 1], memory, state=state).state


def first(model: Any, memory: Any) -> torch.Tensor:
    """The state before any token: what the backward unit left at the first word."""
    hidden: torch.Tensor = model.decoder.initial_proj(memory.y[:, :1, 8:]).tanh()
    return hidden


@pytest.mark.parametrize("name", ["transformer-lm", "bert", "transformer-classifier"])
def test_a_text_looks_at_itself(name: str) -> None:
    given = {"classes": 2} if name == "transformer-classifier" else {}
    actual = attention_maps(built(name, **SMALL, **given), "abc")
    assert [one.part for one in actual] == ["body.0.attention", "body.1.attention"]
    assert (
        actual[0].rows == actual[0].columns == ("<bos>", "a", "b", "c", "<eos>")[: 4 if name == "transformer-lm" else 5]
    )
    if name == "transformer-lm":
        assert not actual[0].weights.triu(1).any()


def test_a_part_is_chosen_by_name_and_number() -> None:
    actual = attention_maps(built("transformer", **SMALL), "abcd", "ab")
    assert select_map(actual).part == select_map(actual, layer=2).part == "decoder.1.cross"
    assert select_map(actual, layer=1).part == "decoder.0.cross"
    assert select_map(actual, part="encoder", layer=1).part == "encoder.0.attention"
    with pytest.raises(UserError, match=r"no part 'encodr'; known: decoder\.0\.attention, "):
        select_map(actual, part="encodr")
    with pytest.raises(UserError, match=r"layer \(9\) must be 1 to 2: .* are decoder\.0\.cross, decoder\.1\.cross"):
        select_map(actual, layer=9)


def test_the_text_form_names_what_is_looked_at_most() -> None:
    weights = torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.1, 0.9]]])
    attention = AttentionMap("x", ("ja", "nein"), ("yes", "no"), weights, keys="source")
    assert describe_map(attention).splitlines() == ["  ja ██ yes 50%", "nein ▒█ no 70%"]
    assert describe_map(attention, 0).splitlines() == ["  ja █· yes 100%", "nein ██ yes 50%"]
    assert describe_map(attention, 1).splitlines() == ["  ja ·█ no 100%", "nein ░█ no 90%"]


def test_small_weights_of_long_rows_are_visible() -> None:
    weights = torch.full((1, 1, 100), 0.005)
    weights[0, 0, 7] = 0.505
    shares = row_shares(weights)
    assert shares[0, 0, 7] == 1
    assert shares[0, 0, 0] == pytest.approx(0.005 / 0.505)
    assert not row_shares(torch.zeros(1, 1, 3)).any()


def test_a_title_is_not_wider_than_its_panel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    module = sys.modules[draw_maps.__module__]
    monkeypatch.setattr(module, "write_picture", lambda figure, path: figures.append(figure))
    narrow = AttentionMap("decoder.0.cross", ("a",), ("b", "c"), torch.rand(5, 1, 2), keys="source")
    draw_maps({"a-folder-with-a-rather-long-name": narrow}, tmp_path / "heads.png", per_head=True)
    [figure] = figures
    figure.canvas.draw()
    boxes = [axis.title.get_window_extent() for axis in figure.axes if axis.get_title()]
    assert len(boxes) == 5
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.width for box in boxes)
    assert all(left.x1 <= right.x0 for left, right in pairwise(boxes[:4]))


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    one = select_map(attention_maps(built("transformer", **SMALL), "abcd", "ab"))
    draw_maps({"one": one, "two": one}, tmp_path / "both.png")
    draw_maps({"one": one}, tmp_path / "heads.svg", per_head=True)
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("both.png", "heads.svg"))


def test_what_cannot_be_drawn_is_said() -> None:
    with pytest.raises(UserError, match="only an encoder-decoder writes an answer"):
        attention_maps(built("transformer-lm", **SMALL), "abc", "abc")
    with pytest.raises(UserError, match="no part of fnet has weights"):
        attention_maps(built("fnet", dim=16, depth=1, max_length=32), "abc")
    silent = built("transformer-lm", **SMALL)
    silent.tokenizer = None
    with pytest.raises(UserError, match="without a tokenizer"):
        attention_maps(silent, "abc")


@pytest.mark.parametrize("ids", [[3, 5, 7, 5], torch.tensor([[3, 5, 7, 5]]), "3 5 7 5"], ids=["list", "tensor", "text"])
def test_a_model_without_a_tokenizer_shows_the_ids_of_tokens(ids: Any) -> None:
    torch.manual_seed(0)
    model = mf.build("llama", vocab=11, dim=16, depth=1, heads=2).eval()
    (attention,) = attention_maps(model, ids)
    assert attention.rows == attention.columns == ("3", "5", "7", "5")
    seen = {}
    model(torch.tensor([[3, 5, 7, 5]]), watch=lambda module, name, value: seen.setdefault(name, value))
    torch.testing.assert_close(attention.weights, seen["weights"][0])
    assert "<script" in mf.view(model, ids).html
    with pytest.raises(UserError, match=r"without a tokenizer, so it cannot read text; give token ids"):
        attention_maps(model, "some words")
