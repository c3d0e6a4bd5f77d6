"""The task of writing down what a recording says."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor, nn

from manyformer.models import EncoderDecoder, ModelOutput, SpeechRecognizer
from manyformer.models.audio_encoders import label_targets
from manyformer.models.frame_embedding import FrameEmbedding
from manyformer.models.scores import ScoreKind, ScoreRecord, character_error_rate, word_error_rate
from manyformer.models.tasks.requests import EvaluationRequest, EvaluationResult
from manyformer.models.tasks.task import LIKELIHOOD_SHARE, ScoreSums, Task, likelihood, token_scores
from manyformer.models.tasks.toy import PERIOD, STAND_IN_IDS, SYMBOLS, Toy, ToyDraw, stand_in_vectors
from manyformer.models.tasks.translation import EncoderDecoderTask
from manyformer.nn.batches import IGNORE_INDEX, TextUnits, TranscriptionBatch, to_device
from manyformer.nn.core import PADDING_SEGMENT, State, WatchFn, no_watch
from manyformer.nn.model_inputs import Inputs

START = 1
END = 2

TOKENS_PER_LABEL = 3
"""The number of tokens of each label of drawn recordings: enough for a blank between equal labels."""

ERROR_RATES = {
    "word_error_rate": ScoreKind("%", lower_is_better=True),
    "character_error_rate": ScoreKind("%", lower_is_better=True),
}


@final
class Transcription(Task[SpeechRecognizer]):
    """Writes down recordings; where a task is given tokens, each stands for the frames that the model joins to one."""

    name = "transcription"
    title = "transcription"
    model = SpeechRecognizer
    data_forms: Mapping[str, str] = {"audio": "transcribed"}
    reasons: Mapping[str, str] = {
        "cross_attention": "it reads one sequence only",
        "packing": "a row is one recording",
        "padding-left": "padding before a recording is moved behind it",
        "cross_entropy": "its loss sums over all alignments of a text with its recording",
        "decode": "sound arrives in pieces of any length, which the model itself continues",
        "ragged": "a recording has no padding between its frames",
    }
    score_kinds: Mapping[str, ScoreKind] = ERROR_RATES
    metrics: Mapping[str, bool] = {"loss": True, "accuracy": False, "label_error_rate": True}
    command = "transcribe"
    argument = "FILE.wav"

    def token_ids(self, model: SpeechRecognizer) -> int:
        return STAND_IN_IDS

    def model_reasons(self, model: SpeechRecognizer) -> Mapping[str, str]:
        if not any(isinstance(part, nn.BatchNorm1d) for part in model.modules()):
            return {}
        reason = "while training, batch norm takes its means over all tokens of a batch"
        return {"batch-training": reason, "causal-training": reason}

    def arguments(self, model: SpeechRecognizer, inputs: Inputs) -> tuple[Any, ...]:
        segments = inputs.segments
        # the embedding joins so many frames to one token
        frames = 2**model.embed.halvings
        features = token_features(model.embed, inputs.tokens)
        return features, None if segments is None else segments.repeat_interleave(frames, 1)

    def call(
        self, model: SpeechRecognizer, inputs: Inputs, state: State = None, *, watch: WatchFn = no_watch
    ) -> ModelOutput:
        output: ModelOutput = model(*self.arguments(model, inputs), state, watch=watch)
        return output

    def init_state(self, model: SpeechRecognizer, inputs: Inputs, *, capacity: int | None = None) -> State:
        return model.init_state(inputs.tokens.shape[0], capacity=capacity)

    def batch(self, model: SpeechRecognizer, inputs: Inputs, targets: Tensor) -> TranscriptionBatch:
        """The labels are the targets of every third token, of those that are not padding."""
        features, segments = self.arguments(model, inputs)
        # class 0 is the blank of CTC, which is no label
        labels = targets[:, ::TOKENS_PER_LABEL] % (model.head.classes - 1) + 1
        if inputs.segments is None:
            is_token = torch.ones_like(targets)
        else:
            is_token = inputs.segments != PADDING_SEGMENT
        counts = is_token[:, ::TOKENS_PER_LABEL].sum(1)
        return TranscriptionBatch(features, *_target_sides(labels, counts), segments)

    def random_targets(self, model: SpeechRecognizer, inputs: Inputs, generator: Generator) -> Tensor:
        return inputs.tokens

    def toy(self, model: SpeechRecognizer, draw: ToyDraw) -> Toy:
        """Four sounds, several times; the text has them in reverse order."""
        # more frames than labels, as CTC needs them
        tokens = draw.period.repeat(1, TOKENS_PER_LABEL)
        labels = draw.period.flip(1)
        counts = torch.full_like(labels[:, 0], PERIOD)
        batch = TranscriptionBatch(token_features(model.embed, tokens), *_target_sides(labels, counts))
        # the end of the text is a target, too, and needs no guess
        return Toy(batch, math.log(SYMBOLS) * PERIOD / (PERIOD + 1))

    def validation(self, sums: ScoreSums, units: TextUnits | None) -> dict[str, float]:
        """The loss, and the edits of the labels of best alignments in relation to the number of labels."""
        loss = sums.nats / max(1, sums.targets)
        edits = sums.others["label_edits"]
        labels = sums.others["labels"]
        accuracy = sums.correct / max(1, sums.targets)
        return {"loss": loss, "accuracy": accuracy, "label_error_rate": edits / max(1.0, labels)}

    def evaluate(self, request: EvaluationRequest[SpeechRecognizer]) -> EvaluationResult:
        """Word and character error rates of transcripts by prefix beam search."""
        beam = request.settings.beam
        tokenizer = request.tokenizers.target

        def write(batch: TranscriptionBatch) -> list[str]:
            transcripts = request.model.transcribe(batch.features, batch.segments, beam=beam)
            return [tokenizer.decode(list(labels)) for labels, _ in transcripts]

        scores, count = _error_rates(request, write, first_progress=0.0)
        return EvaluationResult(scores, f"{count:,} recordings, prefix beam {beam}")


@final
class AttentionTranscription(EncoderDecoderTask):
    """Writes down recordings letter by letter; a token of a source stands for frames that the model joins to two."""

    name = "attention-transcription"
    title = "transcription by attention"
    data_forms: Mapping[str, str] = {"audio": "transcribed"}
    reasons: Mapping[str, str] = {"packing": "a row is one recording"}
    score_kinds: Mapping[str, ScoreKind] = ERROR_RATES
    generates = "text"
    command = "transcribe"
    argument = "FILE.wav"

    def token_ids(self, model: EncoderDecoder) -> int:
        return model.embed_target.vocab

    def source(self, model: EncoderDecoder[FrameEmbedding], inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        assert inputs.source is not None
        embed = model.embed_source
        segments = inputs.source_segments
        # as many tokens of sound as CTC needs for a text of this length and a blank after each label
        source = (inputs.source % STAND_IN_IDS).repeat_interleave(2, 1)
        features = token_features(embed, source)
        return features, None if segments is None else segments.repeat_interleave(2 << embed.halvings, 1)

    def toy(self, model: EncoderDecoder, draw: ToyDraw) -> Toy:
        """Four sounds; the text has them in reverse order."""
        text = draw.period.flip(1)
        target = torch.cat([torch.full_like(text[:, :1], START), text[:, :-1]], dim=1)
        features, _ = self.source(model, Inputs(target, source=draw.period))
        return Toy(TranscriptionBatch(features, target, text), math.log(SYMBOLS))

    def evaluate(self, request: EvaluationRequest[EncoderDecoder]) -> EvaluationResult:
        """Word and character error rates of transcripts by beam search; perplexity and accuracy of references."""
        sums = likelihood(request, final_progress=LIKELIHOOD_SHARE)

        def write(batch: TranscriptionBatch) -> Sequence[str]:
            return request.answer_sources(batch.features, batch.segments)

        scores, count = _error_rates(request, write, first_progress=LIKELIHOOD_SHARE)
        return EvaluationResult([*scores, *token_scores(sums)], f"{count:,} recordings, beam {request.settings.beam}")


def _error_rates(
    request: EvaluationRequest[Any], write: Callable[[TranscriptionBatch], Sequence[str]], *, first_progress: float
) -> tuple[list[ScoreRecord], int]:
    """The error rates of what `write` makes of each batch, and the number of recordings."""
    assert request.batches is not None
    texts = list[str]()
    references = list[str]()
    tokenizer = request.tokenizers.target
    for number, batch in enumerate(request.batches, 1):
        moved: Any = to_device(batch, request.model.device)
        texts += write(moved)
        # references as they are learned, in the tokens of the model
        labels, counts, _ = label_targets(moved)
        references += [tokenizer.decode(row[:count]) for row, count in zip(labels.tolist(), counts.tolist())]
        request.on_progress(first_progress + (1 - first_progress) * number / len(request.batches))
    return [word_error_rate(texts, references), character_error_rate(texts, references)], len(texts)


def token_features(embed: FrameEmbedding, tokens: Int[Tensor, "b l"]) -> Float[Tensor, "b f m"]:
    """The frames that stand for token ids, as many for each as the embedding joins to a token."""
    frames: Tensor = stand_in_vectors(torch.randn, embed.mels << embed.halvings, tokens.device)(tokens)
    return frames.view(len(tokens), tokens.shape[1] << embed.halvings, embed.mels)


def _target_sides(
    labels: Int[Tensor, "b n"], counts: Int[Tensor, " b"]
) -> tuple[Int[Tensor, "b t"], Int[Tensor, "b t"]]:
    """`target` and `targets` of a `TranscriptionBatch` for the first `counts` labels of each row."""
    start = torch.full_like(counts, START)[:, None]
    # one column more than labels, for the end token
    columns = torch.arange(labels.shape[1] + 1, device=labels.device)
    shifted = torch.cat([labels, start], 1)
    ended = torch.where(columns == counts[:, None], END, IGNORE_INDEX)
    return torch.cat([start, labels], 1), torch.where(columns < counts[:, None], shifted, ended)


TRANSCRIPTION = Transcription()
ATTENTION_TRANSCRIPTION = AttentionTranscription()
