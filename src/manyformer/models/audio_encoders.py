"""Encoders of sound: one label for each recording, or its text by connectionist temporal classification."""

from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.base.errors import UserError
from manyformer.models.encoder_model import mean_over_tokens
from manyformer.models.frame_embedding import FrameEmbedding, FrameState, is_frame
from manyformer.models.head import BatchLoss, BatchScore, ClassHead, apply_head
from manyformer.models.model import Model, ModelOutput, max_length_of
from manyformer.models.temporal_res_net import TemporalResNet
from manyformer.nn.batches import IGNORE_INDEX, AudioClassificationBatch, TranscriptionBatch
from manyformer.nn.core import Context, Layer, LayerOutput, State, WatchFn, apply_layer, no_watch
from manyformer.nn.ops.ctc import LabelSequence, ctc_losses, edit_distance, greedy_labels, prefix_beam_search


@final
class AudioClassifier(Model[AudioClassificationBatch]):
    """Classifies recordings by the mean over their embedded frames without padding; logits are (b, classes)."""

    def __init__(self, embed: FrameEmbedding | TemporalResNet, body: Layer, head: ClassHead) -> None:
        super().__init__()
        self.embed = embed
        self.body = body
        self.head = head
        self.max_length = embed.max_length
        self._max_tokens = max_length_of(body)

    def forward(
        self, features: Float[Tensor, "b f m"], segments: Int[Tensor, "b f"] | None = None, *, watch: WatchFn = no_watch
    ) -> ModelOutput:
        pooled = self._pool(features, segments, watch)
        return ModelOutput(apply_head(self.head, pooled.y), None, pooled.loss)

    def head_inputs(self, batch: AudioClassificationBatch, state: State) -> tuple[LayerOutput, Tensor]:
        return self._pool(batch.features, batch.segments, no_watch), batch.labels

    def _pool(self, features: Tensor, segments: Tensor | None, watch: WatchFn) -> LayerOutput:
        x, positions = self.embed.read_source(features, segments)
        hidden = apply_layer(self.body, x, Context(positions, watch=watch))
        return LayerOutput(mean_over_tokens(hidden.y, positions), None, hidden.loss)


class RecognizerState(NamedTuple):
    """The state of a recognizer between pieces of sound: that of the embedding of frames and that of the layers."""

    frames: FrameState
    body: State


class LabelTargets(NamedTuple):
    """The labels of each row and their number; rows without any target are not scored."""

    labels: Int[Tensor, "b t"]
    counts: Int[Tensor, " b"]
    is_scored: Bool[Tensor, " b"]


@final
class SpeechRecognizer(Model[TranscriptionBatch]):
    """Frames (b, f, mels) -> tokens of several frames -> labels, by CTC (Graves et al. 2006); logits are (b, l, vocab).

    Each row of a batch is one recording; `segments` of frames are 0, and -1 for padding after it. Class 0, the
    padding id of tokenizers, is the blank. The loss is divided by the number of labels and ends of sequences. With a
    state from `init_state` or an earlier call, frames continue those before them, if the layers are causal. Raises
    UserError with a state for frames that fill no whole tokens."""

    def __init__(self, embed: FrameEmbedding, body: Layer, head: ClassHead) -> None:
        super().__init__()
        self.embed = embed
        self.body = body
        self.head = head

    def forward(
        self,
        features: Float[Tensor, "b f m"],
        segments: Int[Tensor, "b f"] | None = None,
        state: RecognizerState | None = None,
        *,
        watch: WatchFn = no_watch,
    ) -> ModelOutput:
        embedded, frames = self.embed.read_piece(features, segments, None if state is None else state.frames)
        ctx = Context(embedded.positions, watch=watch)
        body_state = None if state is None else state.body
        y, body, loss = apply_layer(self.body, embedded.x, ctx, body_state)
        return ModelOutput(apply_head(self.head, y), None if frames is None else RecognizerState(frames, body), loss)

    def init_state(self, batch: int, *, capacity: int | None = None) -> RecognizerState:
        """The state before any frame; `capacity`, in tokens, preallocates buffers, for use in `torch.no_grad()`."""
        device = self.device
        dtype = self.state_dtype
        body = self.body.init_state(batch, capacity=capacity, device=device, dtype=dtype)
        return RecognizerState(self.embed.init_state(batch, device=device, dtype=dtype), body)

    def token_counts(self, features: Float[Tensor, "b f m"], segments: Int[Tensor, "b f"] | None) -> Int[Tensor, " b"]:
        """The number of tokens of each row that are not padding."""
        if segments is None:
            counts = torch.full((len(features),), features.shape[1], device=features.device)
        else:
            counts = is_frame(segments).sum(1)
        size = 2**self.embed.halvings
        # rounded up, as each halving is: a token that one frame reaches counts
        tokens: Tensor = (counts + size - 1) // size
        return tokens

    @torch.no_grad()
    def transcribe(
        self, features: Float[Tensor, "b f m"], segments: Int[Tensor, "b f"] | None = None, *, beam: int = 1
    ) -> list[LabelSequence]:
        """The most likely labels of each row: of its best alignment if `beam` is 1, else by prefix beam search."""
        log_probs = self(features, segments).logits.float().log_softmax(-1)
        counts = self.token_counts(features, segments)
        if beam > 1:
            return [prefix_beam_search(row[:count], beam)[0] for row, count in zip(log_probs, counts.tolist())]
        # the best alignment takes the best label of each position
        best = log_probs.amax(-1).cumsum(1)
        totals = [float(row[count - 1]) if count else 0.0 for row, count in zip(best, counts.tolist())]
        return [LabelSequence(*item) for item in zip(greedy_labels(log_probs, counts), totals)]

    def loss(self, batch: TranscriptionBatch, *, label_smoothing: float = 0.0, state: State = None) -> BatchLoss:
        """-log p(labels) of all recordings. Raises UserError for label smoothing, and where no alignment exists."""
        if label_smoothing:
            raise UserError(f"loss.label_smoothing ({label_smoothing}) must be 0: a position of sound has no label")
        # not called as a module, whose hooks the call with the batch runs
        output: ModelOutput = self.forward(batch.features, batch.segments)
        total, _ = self._total_loss(batch, output.logits)
        return BatchLoss(total, _target_count(batch), output.loss)

    def score(self, batch: TranscriptionBatch, *, state: State = None) -> BatchScore:
        """-log p(labels); in `others` the edits that make the labels of the best alignment right, and their number.

        The number of correct targets is that of all targets less the edits, at least 0 for each recording."""
        logits = self.forward(batch.features, batch.segments).logits
        total, targets = self._total_loss(batch, logits)
        predicted = greedy_labels(logits, self.token_counts(batch.features, batch.segments))
        rows = [
            (edit_distance(row, reference[:count].tolist()), count)
            for row, reference, count, scored in zip(
                predicted, targets.labels, targets.counts.tolist(), targets.is_scored.tolist()
            )
            if scored
        ]
        edits = torch.tensor(sum(distance for distance, _ in rows))
        label_count = torch.tensor(sum(count for _, count in rows))
        # the end of each recording is a target too, and always right
        correct = torch.tensor(sum(max(0, count + 1 - distance) for distance, count in rows))
        others = {"label_edits": edits, "labels": label_count}
        return BatchScore(total.cpu().double(), _target_count(batch), correct, others=others)

    def _total_loss(
        self, batch: TranscriptionBatch, logits: Float[Tensor, "b l v"]
    ) -> tuple[Float[Tensor, ""], LabelTargets]:
        targets = label_targets(batch)
        lengths = self.token_counts(batch.features, batch.segments)
        losses = ctc_losses(logits, lengths, targets.labels, targets.counts)
        return torch.where(targets.is_scored, losses, 0.0).sum(), targets


def label_targets(batch: TranscriptionBatch) -> LabelTargets:
    """The labels that a batch asks for, without the token that starts and the one that ends a target."""
    scored = (batch.targets != IGNORE_INDEX).sum(1)
    # the last scored target is the end, which CTC does not emit
    return LabelTargets(batch.target[:, 1:], (scored - 1).clamp(min=0), scored > 0)


def _target_count(batch: TranscriptionBatch) -> Int[Tensor, ""]:
    return (batch.targets != IGNORE_INDEX).sum()
