"""Text as it is written: stop strings and letters across token borders, streaming, prompts."""

import random
from typing import Any

import pytest
import torch
from writers import Pair, Recurrent, Table

import manyformer as mf
from manyformer.data.tokenizers.saved_tokenizers import train_tokenizer
from manyformer.inference.generate import Decoding, SampledChoice, StreamPiece, generate, stream
from manyformer.inference.generate.prompts import read_prompts
from manyformer.inference.generate.sampling import StopStringStream
from odd_tokenizers import byte_fallback

TEXT = "für die Kühe: 1 € – ✓ naïve abab abc \U0001f600!"
BYTES = train_tokenizer("byte", [])
WORDS = train_tokenizer("bpe", [TEXT * 3, "abab abc abab"], 300)


def scripted(text: str, words: Any = BYTES) -> tuple[Table, list[int]]:
    """A model that says `text` after its first token, whatever else could be said, and the prompt to begin with."""
    tokens = words.encode(text)
    assert len(set(tokens)) == len(tokens), "a table knows only the last token"
    logits = torch.zeros(words.vocab, words.vocab)
    for now, then in zip(tokens, [*tokens[1:], words.eos]):
        logits[now, then] = 99
    return Table(logits), tokens[:1]


def by_letter(text: str, stops: tuple[str, ...]) -> str:
    """The text up to the first stop string to be complete, one letter at a time."""
    for end in range(1, len(text) + 1):
        if actual := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, actual))]
    return text


@pytest.mark.parametrize("words", [BYTES, WORDS], ids=["byte", "bpe"])
def test_stop_strings_wherever_tokens_end(words: Any) -> None:
    draw = random.Random(0)
    for _ in range(400):
        text = "".join(draw.choices("ab €", k=draw.randint(0, 25)))
        stops = tuple("".join(draw.choices("ab €", k=draw.randint(1, 4))) for _ in range(draw.randint(0, 3)))
        writer = StopStringStream(words, stops)
        shown = []
        for token in words.encode(text):
            if not writer.stopped:
                shown.append(writer.push(token))
                # what has been shown is never taken back
                assert by_letter(text, stops).startswith("".join(shown))
        shown.append(writer.finish())
        assert "".join(shown) == writer.text == by_letter(text, stops)
        assert writer.stopped == any(stop in text for stop in stops)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    writer = StopStringStream(BYTES, ("END",))
    assert [writer.push(token) for token in BYTES.encode("xENEN!")] == ["x", "", "", "EN", "", "EN!"]


def test_letters_of_several_tokens_are_shown_whole() -> None:
    writer = StopStringStream(BYTES, ())
    shown = [writer.push(token) for token in BYTES.encode("€a")]
    assert shown == ["", "", "€", "a"]
    broken = StopStringStream(BYTES, ())
    assert [broken.push(token) for token in BYTES.encode("€")[:2]] == ["", ""]
    assert broken.finish() == broken.text == "\ufffd"


def test_a_stop_string_ends_a_row() -> None:
    model, prompt = scripted("abcdefgh")
    row = generate(model, [prompt], tokenizer=BYTES, stop=("zz", "def"), max_new=20).rows[0][0]
    # the text ends before the stop string, the tokens with the one that completed it
    assert (row.text, row.finish) == ("bc", "stop")
    assert row.tokens == BYTES.encode("bcdef")
    assert generate(model, [prompt], tokenizer=BYTES, max_new=20).rows[0][0].finish == "end"
    assert generate(model, "ab", tokenizer=BYTES, max_new=3, stop="x").text == "cde"


@pytest.mark.parametrize("options", [{}, {"seed": 4, "samples": 2}])
def test_pieces_make_the_answers(options: dict[str, Any]) -> None:
    prompts = ["ab", "für", "1 € –"]
    torch.manual_seed(2)
    lm = mf.build("transformer-lm", vocab=WORDS.vocab, dim=32, depth=1, heads=2, max_length=64).eval()
    for model in (lm, Recurrent(WORDS.vocab).eval(), Pair(WORDS.vocab).eval()):
        plain = generate(model, prompts, tokenizer=WORDS, max_new=30, stop=("\n", "ab"), batch=2, **options)
        pieces: list[StreamPiece] = []
        live = generate(
            model, prompts, tokenizer=WORDS, max_new=30, stop=("\n", "ab"), batch=2, on_piece=pieces.append, **options
        )
        assert live.rows == plain.rows
        for number, row in enumerate(live.rows):
            for copy, answer in enumerate(row):
                own = [piece for piece in pieces if (piece.row, piece.sample) == (number, copy)]
                assert "".join(piece.text for piece in own) == answer.text
                assert [piece.token for piece in own if piece.token is not None] == answer.tokens
                assert [piece.finish for piece in own] == [None] * (len(own) - 1) + [answer.finish]


def test_streaming_is_live_and_leaves_no_trace() -> None:
    model = Recurrent(20).train()
    pieces = stream(model, [[3, 4], [5]], Decoding(choice=SampledChoice(1), max_new=50))
    first = next(pieces)
    assert (first.row, first.text) == (0, "")
    # only what has been asked for is computed, and inference mode is not on in between
    assert model.read <= 8
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()
    assert not model.training
    pieces.close()  # type: ignore[attr-defined]
    assert model.training
    assert len(list(stream(model, [[3, 4], [5]], Decoding(choice=SampledChoice(1), max_new=50)))) == 100
    assert model.training


def test_a_failure_leaves_the_model_in_training() -> None:
    model = Recurrent(3).train()
    with pytest.raises(ValueError, match="nothing to choose"):
        generate(model, [[0]], no_repeat_ngram=1, max_new=9)
    assert model.training


def test_the_tokenizer_says_what_ends_and_what_never_comes() -> None:
    logits = torch.zeros(BYTES.vocab, BYTES.vocab)
    logits[:, BYTES.pad], logits[:, BYTES.bos], logits[:, BYTES.eos] = 3, 2, 1
    model = Table(logits)
    assert generate(model, "a", tokenizer=BYTES, max_new=5).rows[0][0] == ([], "", None, "end")
    # without a tokenizer a token is a number
    assert generate(model, [[50]], max_new=2).tokens == [[0, 0]]
    assert generate(model, "a", tokenizer=BYTES, max_new=2, decoding=None, stop_ids=()).tokens == [[2, 2]]


def test_prompts_in_every_form() -> None:
    model = Recurrent(BYTES.vocab).eval()
    ids = BYTES.encode("ab")
    expected = generate(model, [ids], max_new=3).tokens
    for prompts in (ids, torch.tensor(ids), torch.tensor([ids]), [torch.tensor(ids)], (tuple(ids),)):
        assert generate(model, prompts, max_new=3).tokens == expected
    assert generate(model, "ab", tokenizer=BYTES, max_new=3, stop_ids=()).tokens == expected
    model.tokenizer = BYTES  # type: ignore[assignment]
    assert generate(model, ["ab"], max_new=3, stop_ids=()).tokens == expected
    assert read_prompts(["", "a"], BYTES, source=False) == [[1], [102]]
    assert read_prompts(["", "a"], BYTES, source=False, begin=True) == [[1], [1, 102]]
    assert read_prompts(["", "a"], BYTES, source=True) == [[2], [102, 2]]
    # texts of an imported tokenizer whose template begins them begin so, unless the caller wants a piece of a text
    template = byte_fallback()
    template.prepends_bos = template.begins_prompts = True
    ids = template.encode("a")
    assert read_prompts(["a"], template, source=False) == [[template.bos, *ids]]
    assert read_prompts(["a"], template, source=False, begin=False) == [ids]


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "there is no prompt: give at least one"),
        ([[1], []], {}, "prompt 1 is empty"),
        ("ab", {}, "prompt 0 is a string, which needs a tokenizer"),
        ([[1], [2, 9]], {}, "prompt 1 has token 9, but the model's tokens are 0 to 8"),
        ([[1, -1]], {}, "prompt 0 has token -1"),
        (torch.zeros(1, 2, 3, dtype=torch.long), {}, r"prompt 0 is a tensor of shape \(2, 3\)"),
        (torch.tensor([0.5]), {}, "prompt 0 is a tensor"),
        ([[0.5]], {}, "prompt 0 is a list: give a string, a list of token ids"),
        ([[1] * 12], {}, "prompt 0 has 12 tokens, and the model allows 12 in all: shorten it to 11"),
        ([[1] * 4], {"max_new": 9}, "prompt 0 has 4 tokens and max_new is 9, .* 12 in all: ask for at most 8"),
        ([[1]], {"stop": "x"}, "stop strings need a tokenizer"),
        ([[1]], {"batch": 0}, "batch must be 1 or more rows, got 0"),
        ([[1]], {"decoding": Decoding(), "max_new": 3}, "give either decoding= or single settings, not both"),
    ],
)
def test_prompts_and_options_that_cannot_be_are_refused(prompts: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(Recurrent(9, max_length=12).eval(), prompts, **options)


def test_other_models_do_not_write() -> None:
    model = mf.build("bert", vocab=20, dim=32, depth=1, heads=2)
    with pytest.raises(
        ValueError, match="a MaskedLM does not generate text: generate needs a language model or an enc"
    ):
        generate(model, [[5]])  # type: ignore[arg-type]


def test_text_needs_a_tokenizer() -> None:
    actual = generate(Recurrent(9).eval(), [[1]], max_new=2)
    with pytest.raises(ValueError, match="no text without a tokenizer"):
        _ = actual.text
