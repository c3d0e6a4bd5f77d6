"""What a model does for each token, and how far its heads look back: told, drawn, and from the command line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import manyformer as mf
from manyformer.analysis.figures.token_work import (
    TOKENS_PER_ROW,
    TokenCounts,
    describe_counts,
    describe_spans,
    draw_counts,
    draw_spans,
    layer_spans,
    layer_spans_for_text,
    token_work,
)
from manyformer.base.errors import UserError
from manyformer.base.files.verified_folder import write_manifest
from manyformer.cli import run
from manyformer.data.tokenizers.saved_tokenizers import train_tokenizer
from perturbing import perturb

TEXT = "abcdabcdefgh abc"


def built(name: str, **keywords: Any) -> Any:
    words = train_tokenizer("char", [TEXT])
    model = mf.build(name, vocab=words.vocab, dim=16, heads=2, **keywords)
    perturb(model, 0.3)
    model.tokenizer = words
    return model


def test_the_steps_of_a_text_are_those_that_the_model_took() -> None:
    model = built("universal-transformer-lm", depth=5).eval()
    [one] = token_work(model, "abcd")
    assert one.tokens == ("<bos>", "a", "b", "c", "d")
    assert (one.title, one.maximum) == ("body: steps", 5.0)
    assert all(1 <= number <= 5 for number in one.numbers)
    loss = model(torch.tensor([[1, *model.tokenizer.encode("abcd")]])).loss.item()
    assert one.halting is not None
    assert [len(chances) for chances in one.halting] == list(one.numbers)
    # who halts before the last step has come to nearly 1
    assert all(sum(chances) > 0.99 for chances in one.halting if len(chances) < 5)
    # the loss is of the mean of the steps and of what was left
    assert one.mean < loss / model.body.halting.ponder_cost <= one.mean + 1


def test_both_sides_of_a_translation_are_counted() -> None:
    encoder, decoder = token_work(built("universal-transformer", depth=3), "abc", "hg")
    assert (encoder.title, decoder.title) == ("encoder: steps", "decoder: steps")
    assert encoder.label == "steps"
    assert (encoder.tokens[-1], decoder.tokens) == ("<eos>", ("<bos>", "h", "g"))


def test_spans_are_printed_and_drawn(tmp_path: Path) -> None:
    model = built("adaptive-span", depth=2, max_span=40, span_init=0.5)
    layers = layer_spans(model)
    assert [one.part for one in layers] == ["body.0.attention", "body.1.attention"]
    shares = [layer.attention.inner.kernel.spans.share.clamp(0, 1) * 40 for layer in model.body.children()]
    for one, share in zip(layers, shares):
        assert one.spans == pytest.approx(share.tolist())
    mean = torch.stack(shares).mean().item()
    assert describe_spans(layers).endswith(f"mean {mean:.1f} of 40 tokens, and 32 more to fade out")
    assert layer_spans_for_text(model, "abc") == layers
    draw_spans(layers, tmp_path / "spans.png", title="two layers")
    assert (tmp_path / "spans.png").stat().st_size > 1000
    with pytest.raises(UserError, match="give a text"):
        layer_spans(built("adaptive-span", depth=1, max_span=40, span_init=0.5, span_kind="dynamic"))
    assert (
        len(
            layer_spans_for_text(
                built("adaptive-span", depth=1, max_span=40, span_init=0.5, span_kind="dynamic"), "abc"
            )
        )
        == 1
    )


def test_models_that_count_nothing_say_so() -> None:
    plain = built("transformer-lm", depth=1)
    with pytest.raises(UserError, match="transformer-lm does the same for every token"):
        token_work(plain, "abc")
    with pytest.raises(UserError, match="only an encoder-decoder writes"):
        token_work(plain, "abc", "d")
    for ask in (lambda: layer_spans(plain), lambda: layer_spans_for_text(plain, "abc")):
        with pytest.raises(UserError, match="adaptive-span does"):
            ask()
    plain.tokenizer = None
    with pytest.raises(UserError, match="without a tokenizer"):
        token_work(plain, "abc")


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, keywords in (("universal-transformer-lm", {"depth": 3}), ("adaptive-span", {"depth": 1, "max_span": 9})):
        model = built(name, **keywords)
        model.save(tmp_path / name)
        model.tokenizer.save(tmp_path / name / "tokenizer.json")
        write_manifest(tmp_path / name)
    words = ["calibrate", str(tmp_path / "universal-transformer-lm"), "--text", "abc"]
    run([*words, "--out", str(tmp_path / "steps.png")])
    assert "body: steps, mean" in capsys.readouterr().out
    run([*words, "--json"])
    assert len(json.loads(capsys.readouterr().out)[0]["numbers"]) == 4
    run(["spans", str(tmp_path / "adaptive-span"), "--out", str(tmp_path / "spans.svg")])
    assert "of 9 tokens" in capsys.readouterr().out
    run(["spans", str(tmp_path / "adaptive-span"), "abc", "--json"])
    assert json.loads(capsys.readouterr().out)[0]["max_length"] == 9
    assert (tmp_path / "steps.png").stat().st_size > 1000


def test_every_token_has_a_line_and_a_bar_as_long_as_its_number() -> None:
    assert describe_counts(TokenCounts("", ("a", "dog"), (2, 4), 6)) == "  a ██     2\ndog ████   4"
    assert describe_counts(TokenCounts("", ("a",), (2.5,), 100)) == f"a {'█' * 1:<24} 2.5"


def test_long_texts_have_several_rows_and_any_token_can_be_drawn(tmp_path: Path) -> None:
    tokens = ["$x$", "", "␣"] * TOKENS_PER_ROW
    one = TokenCounts("decoder", tuple(tokens), tuple(float(n % 5 + 1) for n in range(len(tokens))), 5.0)
    draw_counts([one, one._replace(title="encoder")], tmp_path / "steps.png")
    assert (tmp_path / "steps.png").stat().st_size > 1000
    assert len(describe_counts(one).split("\n")) == len(tokens)
    assert one.mean == pytest.approx(3.0)


def test_the_suffix_must_be_that_of_a_picture() -> None:
    with pytest.raises(UserError, match="must end in one of"):
        draw_counts([TokenCounts("", ("a",), (1,), 1)], "a.gif")
