"""The task of finding the answer to a question in a document, as a span of its tokens."""

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from manyformer.models import ClassHead, EncoderModel, SpanReader
from manyformer.models.scores import ScoreKind, answer_exact_match, answer_f1
from manyformer.models.tasks.masked_language_modelling import BIDIRECTIONAL, EncoderHeadSettings, EncoderTask
from manyformer.models.tasks.requests import (
    EncodedText,
    EvaluationRequest,
    EvaluationResult,
    LabelProbability,
    Prediction,
    PredictionRequest,
    TextPass,
)
from manyformer.models.tasks.task import text_pass
from manyformer.models.tasks.toy import FIRST_SYMBOL, SYMBOLS, Toy, ToyDraw
from manyformer.nn.batches import AnswerSpanBatch
from manyformer.nn.batches.two_texts import (
    DocumentEncoder,
    FramedTexts,
    answer_text,
    first_text_roles,
    frame_question,
    halves,
    pad_texts,
)
from manyformer.nn.model_inputs import Inputs

MAX_ANSWER_TOKENS = 30
"""The longest answer that is predicted (Devlin et al.'s `max_answer_length`)."""
NO_ANSWER = "(no answer)"
"""The label of an empty answer."""
ROWS_PER_BATCH = 8
"""Long documents of which many would not fit in memory."""


class Question(NamedTuple):
    """A question about a document."""

    question: str
    document: str


@final
class AnswerSpans(EncoderTask[SpanReader]):
    """Finds the first and the last token of an answer; in drawn tokens the first one is the question."""

    name = "answer-spans"
    title = "answering questions by spans"
    model = SpanReader
    data_forms: Mapping[str, str] = {"questions": "spans"}
    reasons: Mapping[str, str] = {
        **BIDIRECTIONAL,
        "cross_entropy": "both softmaxes are over the tokens of a row (tests/models/test_span_reader.py)",
    }
    score_kinds: Mapping[str, ScoreKind] = {"exact_match": ScoreKind("%"), "answer_f1": ScoreKind("%")}
    has_labels = False
    command = "predict"
    argument = "FILE"

    def arguments(self, model: SpanReader, inputs: Inputs) -> tuple[Any, ...]:
        parts = halves(inputs.tokens, inputs.segments)
        return inputs.tokens, inputs.segments, *self._marks(model, parts, has_global_question=True)

    def batch(self, model: SpanReader, inputs: Inputs, targets: Tensor) -> AnswerSpanBatch:
        tokens, segments, roles, parts = self.arguments(model, inputs)
        # some contracts draw a target for each token
        return AnswerSpanBatch(tokens, targets[:, :2], segments, roles=roles, parts=parts)

    def random_targets(self, model: SpanReader, inputs: Inputs, generator: Generator) -> Tensor:
        return torch.zeros(len(inputs.tokens), 2, dtype=torch.long, device=inputs.tokens.device)

    def toy(self, model: SpanReader, draw: ToyDraw) -> Toy:
        """Rows of a symbol and all symbols in some order; the answer is where the first symbol occurs again."""
        queried = draw.period[:, :1]
        order = torch.rand(len(queried), SYMBOLS, generator=draw.generator).argsort(1).to(queried.device)
        tokens = torch.cat([queried, FIRST_SYMBOL + order], 1)
        column = (tokens[:, 1:] == queried).long().argmax(1, keepdim=True) + 1
        return Toy(self.batch(model, Inputs(tokens), column.expand(-1, 2)), math.log(SYMBOLS))

    def with_head(self, encoder: EncoderModel, settings: EncoderHeadSettings) -> SpanReader:
        """Two vectors whose products with a token score it as start and as end (Devlin et al. 2019, section 4.2)."""
        return SpanReader(encoder.embed, encoder.body, ClassHead(encoder.dim, 2, bias=True))

    def evaluate(self, request: EvaluationRequest[SpanReader]) -> EvaluationResult:
        """Exact match and F1 of the best answers."""
        questions = [Question(example.more[0], example.source) for example in request.examples]
        references = [example.target for example in request.examples]
        answers = []
        for best in self._answers(request, questions, 1):
            answers.append("" if best[0].label == NO_ANSWER else best[0].label)
            request.on_progress(len(answers) / len(questions))
        empty = sum(not reference for reference in references)
        scores = [answer_exact_match(answers, references), answer_f1(answers, references)]
        return EvaluationResult(scores, f"{len(questions):,} questions, {empty:,} without an answer")

    def predict(self, request: PredictionRequest[SpanReader]) -> Iterator[Prediction]:
        """The most likely answers to each question, with their probabilities among all spans."""
        questions = (Question(question, document) for document, question in request.pairs)
        return ((answers,) for answers in self._answers(request, questions, request.top))

    def text_passes(self, model: SpanReader, text: EncodedText) -> list[TextPass]:
        return [text_pass(self, model, [text.tokenizer.bos, *text.ids, text.tokenizer.eos], text)]

    def _answers(
        self,
        request: EvaluationRequest[SpanReader] | PredictionRequest[SpanReader],
        questions: Iterable[Question],
        top: int,
    ) -> Iterator[tuple[LabelProbability, ...]]:
        """The `top` best answers to each question."""
        model = request.model
        tokenizer = request.tokenizers.source
        waiting = iter(questions)
        encode = DocumentEncoder(tokenizer)
        section: Any = request.section
        has_global_question = section.global_tokens == "question"
        while chunk := list(islice(waiting, ROWS_PER_BATCH)):
            rows = [frame_question(question, document, encode, request.row_length) for question, document in chunk]
            tokens, segments, parts = pad_texts(rows, tokenizer.pad, model.device)
            marks = self._marks(model, parts, has_global_question=has_global_question)
            logits = model(tokens, segments, *marks).logits.float()
            for row, row_logits, (_, document) in zip(rows, logits, chunk):
                yield best_answers(row_logits[: len(row.tokens)], row, document, top)

    def _marks(
        self, model: SpanReader, parts: Tensor, *, has_global_question: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """The roles and the parts, each for a model that uses it."""
        roles = None
        if model.uses_roles and has_global_question:
            roles = first_text_roles(parts)
        return roles, parts if model.uses_parts else None


def best_answers(
    logits: Float[Tensor, "l 2"], row: FramedTexts, document: str, top: int
) -> tuple[LabelProbability, ...]:
    """The `top` most likely answers of a row, the best first, of which several spans of one text count as the best.

    An answer is the characters of the document from its first token to its last; white space alone is none.

    The probability is a softmax over all spans of the document of at most `MAX_ANSWER_TOKENS` tokens, and over the one
    of no answer, of the sum of the scores of both ends (Devlin et al. 2019, sections 4.2 and 4.3)."""
    stop = len(row.tokens) - 1
    starts = torch.arange(row.start, stop, device=logits.device)
    begin, end = logits.unbind(-1)
    widths = torch.arange(MAX_ANSWER_TOKENS, device=logits.device)
    columns = starts[:, None] + widths
    scores = (begin[starts][:, None] + end[columns.clamp(max=stop - 1)]).masked_fill(columns >= stop, -math.inf)
    probabilities = torch.cat([(begin[:1] + end[:1]), scores.flatten()]).softmax(0)
    # the same text may occur at several places
    values, indices = probabilities.topk(min(len(probabilities), 4 * top))
    answers: dict[str, float] = {}
    for value, index in zip(values.tolist(), indices.tolist()):
        start, width = divmod(index - 1, MAX_ANSWER_TOKENS)
        last = start + width
        # scores of minus infinity stand for ends beyond the row
        if index and last >= len(row.spans):
            continue
        if index:
            text = answer_text(document, row.spans[start], row.spans[last])
        else:
            text = NO_ANSWER
        if text:
            answers.setdefault(text, value)
    return tuple(LabelProbability(text, value) for text, value in islice(answers.items(), top))


ANSWER_SPANS = AnswerSpans()
