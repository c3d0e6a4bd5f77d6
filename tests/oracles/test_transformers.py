"""GPT-2, BERT and Marian of `transformers`, with random weights, are our recipes: same outputs, same gradients."""

from typing import Any

import pytest
import torch
from mapping import by_family, gradients_of
from pairs import END, LONGEST, VOCAB, bert_pair, gpt2_pair, marian_pair
from torch import Tensor, nn

from manyformer.inference.generate import (
    AverageLogProbPenalty,
    BeamSettings,
    Decoding,
    Hypothesis,
    LikelyStopping,
    generate,
)
from manyformer.nn.batches import IGNORE_INDEX, CausalLMBatch, MaskedLMBatch, Seq2SeqBatch
from manyformer.nn.core import PADDING_SEGMENT
from transformers_cache import cached_pass

pytestmark = pytest.mark.oracle

pairs_of_gpt2 = pytest.fixture(scope="module", name="gpt2_models")(gpt2_pair)
pairs_of_bert = pytest.fixture(scope="module", name="bert_models")(bert_pair)
pairs_of_marian = pytest.fixture(scope="module", name="marian_models")(marian_pair)


def words(*shape: int) -> Tensor:
    """Random tokens without the first three, which mean padding, the end and the beginning."""
    return torch.randint(3, VOCAB, shape)


def attention_of(segments: Tensor) -> Tensor:
    return (segments != PADDING_SEGMENT).long()


def padded(lengths: list[int], side: str) -> Tensor:
    """Segments of one document a row, with padding on one side."""
    width = max(lengths)
    column = torch.arange(width)
    counts = torch.tensor(lengths)[:, None]
    real = column < counts if side == "right" else column >= width - counts
    return torch.where(real, 0, PADDING_SEGMENT)


def assert_near(ours: Tensor, theirs: Tensor) -> None:
    """To 1e-5, as the issue demands; the size of the numbers must make that a demand."""
    assert theirs.std() > 0.3
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def assert_same_gradients(ours: nn.Module, mapped: dict[str, Tensor]) -> None:
    for name, value in ours.named_parameters():
        assert value.grad is not None, name
        largest = mapped[name].abs().max().item()
        torch.testing.assert_close(
            value.grad, mapped[name], atol=1e-5 * largest + 1e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("length", [1, 2, 17, LONGEST])
def test_gpt2_logits(gpt2_models: tuple[Any, Any], length: int) -> None:
    ours, reference = gpt2_models
    tokens = words(3, length)
    with torch.no_grad():
        assert_near(ours(tokens).logits, reference(tokens).logits)


@pytest.mark.parametrize("side", ["left", "right"])
def test_gpt2_padding(gpt2_models: tuple[Any, Any], side: str) -> None:
    ours, reference = gpt2_models
    segments = padded([11, 4, 7], side)
    tokens, mask = words(3, 11), attention_of(segments)
    position = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = reference(tokens, attention_mask=mask, position_ids=position).logits
        assert_near(ours(tokens, segments).logits[mask.bool()], expected[mask.bool()])


@pytest.mark.parametrize("capacity", [None, LONGEST])
def test_gpt2_cache(gpt2_models: tuple[Any, Any], capacity: int | None) -> None:
    ours, reference = gpt2_models
    tokens = words(2, 15)
    state, past = ours.init_state(2, capacity=capacity), None
    with torch.no_grad():
        for part in tokens.split([6, 1, 1, 4, 3], dim=1):
            mine = ours(part, state=state)
            state, (expected, past) = mine.state, cached_pass(reference, past, input_ids=part)
            assert_near(mine.logits, expected)


def test_gpt2_gradients(gpt2_models: tuple[Any, Any]) -> None:
    ours, reference = gpt2_models
    tokens = words(3, 12)
    targets = torch.where(torch.rand(3, 12) < 0.3, IGNORE_INDEX, words(3, 12))
    ours.zero_grad()
    reference.zero_grad()
    loss = ours.loss(CausalLMBatch(tokens, targets))
    loss.total.div(loss.targets).backward()
    # they shift the labels themselves
    labels = torch.cat([torch.full((3, 1), IGNORE_INDEX), targets], dim=1)
    reference(torch.cat([tokens, tokens[:, :1]], dim=1), labels=labels).loss.backward()
    assert_same_gradients(ours, by_family("gpt2", ours, gradients_of(reference)))


@pytest.mark.parametrize("lengths", [[9, 9, 9], [12, 3, 8]])
def test_bert_logits(bert_models: tuple[Any, Any], lengths: list[int]) -> None:
    ours, reference = bert_models
    segments = padded(lengths, "right")
    tokens, mask = words(3, max(lengths)), attention_of(segments)
    with torch.no_grad():
        expected = reference(tokens, attention_mask=mask).logits
        assert_near(ours(tokens, segments).logits[mask.bool()], expected[mask.bool()])


def test_bert_gradients(bert_models: tuple[Any, Any]) -> None:
    ours, reference = bert_models
    segments = padded([12, 5, 9], "right")
    tokens, mask = words(3, 12), attention_of(segments)
    targets = torch.where((torch.rand(3, 12) < 0.5) & mask.bool(), words(3, 12), IGNORE_INDEX)
    ours.zero_grad()
    reference.zero_grad()
    loss = ours.loss(MaskedLMBatch(tokens, targets, segments))
    loss.total.div(loss.targets).backward()
    reference(tokens, attention_mask=mask, labels=targets).loss.backward()
    assert_same_gradients(ours, by_family("bert", ours, gradients_of(reference)))


@pytest.mark.parametrize("lengths", [[9, 9, 9], [13, 2, 8]])
def test_marian_logits(marian_models: tuple[Any, Any], lengths: list[int]) -> None:
    ours, reference = marian_models
    segments = padded(lengths, "right")
    source, target = words(3, max(lengths)), words(3, 7)
    with torch.no_grad():
        expected = reference(source, attention_mask=attention_of(segments), decoder_input_ids=target).logits
        assert_near(ours(source, target, segments).logits, expected)


@pytest.mark.parametrize("capacity", [None, 12])
def test_marian_cache(marian_models: tuple[Any, Any], capacity: int | None) -> None:
    ours, reference = marian_models
    segments = padded([10, 4], "right")
    source, target = words(2, 10), words(2, 12)
    with torch.no_grad():
        expected = reference(source, attention_mask=attention_of(segments), decoder_input_ids=target).logits
        memory, state, logits = ours.encode(source, segments), ours.init_state(2, capacity=capacity), []
        for part in target.split([1, 5, 1, 1, 4], dim=1):
            out = ours.decode(part, memory, state=state)
            state = out.state
            logits.append(out.logits)
    assert_near(torch.cat(logits, dim=1), expected)


def test_marian_gradients(marian_models: tuple[Any, Any]) -> None:
    ours, reference = marian_models
    segments = padded([10, 4, 6], "right")
    source, target = words(3, 10), words(3, 8)
    targets = torch.where(padded([8, 5, 6], "right") == PADDING_SEGMENT, IGNORE_INDEX, words(3, 8))
    ours.zero_grad()
    reference.zero_grad()
    loss = ours.loss(Seq2SeqBatch(source, target, targets, segments))
    loss.total.div(loss.targets).backward()
    mask = attention_of(segments)
    reference(source, attention_mask=mask, decoder_input_ids=target, labels=targets).loss.backward()
    assert_same_gradients(ours, by_family("marian", ours, gradients_of(reference)))


def beamed(width: int, best: int, alpha: float, max_new: int) -> Decoding:
    """The rules of `transformers`: its length penalty, its way to end."""
    pick = BeamSettings(width, AverageLogProbPenalty(alpha), best, LikelyStopping())
    return Decoding(choice=pick, max_new=max_new, stop_ids=(END,), ban=())


def assert_same_beams(answers: tuple[tuple[Hypothesis, ...], ...], sequences: Tensor, scores: Tensor) -> None:
    """The same texts in the same order with the same scores; their rows are padded after the end token."""
    ours = [answer for row in answers for answer in row]
    assert len(ours) == len(sequences)
    for answer, row, score in zip(ours, sequences.tolist(), scores.tolist()):
        ended = END in row
        assert answer.tokens == (row[: row.index(END)] if ended else row[: len(answer.tokens)])
        assert answer.finish == ("end" if ended else "limit")
        assert answer.score == pytest.approx(score, abs=1e-5)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_gpt2_beam_search(gpt2_models: tuple[Any, Any], alpha: float) -> None:
    ours, reference = gpt2_models
    prompts = [words(n).tolist() for n in (5, 2, 8, 8, 1)]
    answers = generate(ours, prompts, decoding=beamed(4, 3, alpha, 12)).rows
    segments = padded([len(p) for p in prompts], "left")
    tokens = torch.zeros_like(segments)
    for row, prompt in zip(tokens, prompts):
        row[-len(prompt) :] = torch.tensor(prompt)
    out = reference.generate(
        tokens,
        attention_mask=attention_of(segments),
        num_beams=4,
        num_return_sequences=3,
        length_penalty=alpha,
        max_new_tokens=12,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert_same_beams(answers, out.sequences[:, tokens.shape[1] :], out.sequences_scores)
    assert {answer.finish for row in answers for answer in row} == {"end", "limit"}


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_marian_beam_search(marian_models: tuple[Any, Any], alpha: float) -> None:
    ours, reference = marian_models
    sources = [words(n).tolist() for n in (6, 3, 9, 9)]
    decoding = beamed(4, 4, alpha, 10)
    segments = padded([len(s) for s in sources], "right")
    tokens = torch.zeros_like(segments)
    for row, source in zip(tokens, sources):
        row[: len(source)] = torch.tensor(source)
    out = reference.generate(
        tokens,
        attention_mask=attention_of(segments),
        num_beams=4,
        num_return_sequences=4,
        length_penalty=alpha,
        max_new_tokens=10,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    answers = generate(ours, sources, decoding=decoding).rows
    assert_same_beams(answers, out.sequences[:, 1:], out.sequences_scores)
