"""Recordings, or several joined to an utterance, as batches of log-mel features, masked in training."""

from collections.abc import Sequence
from typing import NamedTuple, final

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from manyformer.base.type_aliases import IntArray
from manyformer.data.audio.audio_reading import INT16_SCALE
from manyformer.data.audio.log_mel import LogMelFrontEnd
from manyformer.data.batching.epochs import FIXED_SEED, FixedEpochPlan, random_generator
from manyformer.data.batching.length_buckets import BucketEpoch, EncodedTexts, SequenceDataset
from manyformer.data.storage.token_shards import TokenShard
from manyformer.data.tokenizers.saved_tokenizers import class_id
from manyformer.data.tokenizers.tokenizer import Tokenizer
from manyformer.nn.batches import AudioClassificationBatch, TranscriptionBatch


@final
class SpecAugment(NamedTuple):
    """Masks of adjacent bands and of adjacent frames, drawn anew for each recording.

    Park et al. 2019, section 2: a mask covers 0 to F adjacent bands, or 0 to T adjacent frames, but at most a `share` p
    of the recording's frames; masked values are 0, which is the mean of normalized features. Without time warping,
    which the paper finds to contribute least."""

    frequency_masks: int = 0
    frequency_mask_width: int = 27
    time_masks: int = 0
    time_mask_width: int = 100
    time_mask_share: float = 0.2

    def apply(
        self, features: Float[Tensor, "b f m"], frames: IntArray, random: np.random.Generator
    ) -> Float[Tensor, "b f m"]:
        """The features with masks; row r has `frames[r]` frames without padding."""
        rows, _, bands = features.shape
        band_counts = np.full(rows, bands)
        widths = np.full(rows, min(self.frequency_mask_width, bands))
        masked_bands = self._draw(self.frequency_masks, widths, band_counts, bands, random)
        # a short recording must not be masked as a whole
        widths = np.minimum(self.time_mask_width, (self.time_mask_share * frames).astype(np.int64))
        masked_frames = self._draw(self.time_masks, widths, frames, features.shape[1], random)
        return features.masked_fill(masked_bands[:, None] | masked_frames[..., None], 0.0)

    @staticmethod
    def _draw(
        masks: int, widths: IntArray, lengths: IntArray, size: int, random: np.random.Generator
    ) -> Bool[Tensor, "b size"]:
        """Whether a mask of its row covers each of `size` columns; masks lie within the first `lengths[r]` of them."""
        # drawn for all rows at once, which a loop over rows would do many times slower
        width = random.integers(0, widths[:, None] + 1, (len(widths), masks))
        start = random.integers(0, lengths[:, None] - width + 1)
        columns = np.arange(size)[:, None]
        covered = (columns >= start[:, None]) & (columns < (start + width)[:, None])
        return torch.from_numpy(covered.any(-1))


NO_MASKS = SpecAugment()
AudioBatch = AudioClassificationBatch | TranscriptionBatch

# Distinguishes the random stream of masks from that of the order.
_MASKING_SEED = 19_04_08779


@final
class Utterances(NamedTuple):
    """The recordings of each utterance: those of utterance i are numbers `offsets[i]` to `offsets[i + 1]`.

    `silences` are the samples of silence before each recording, `tails` those at the end of each utterance."""

    recordings: IntArray
    offsets: IntArray
    silences: IntArray
    tails: IntArray


@final
class JoinedRecordings(NamedTuple):
    """The rule of joined recordings: their least and largest number, and the fewest and most samples of silence."""

    counts: tuple[int, int]
    silence: tuple[int, int]

    def draw(self, recordings: IntArray, random: np.random.Generator) -> Utterances:
        """Utterances of these recordings, each in one of them, in random order and groups."""
        low, high = self.counts
        # as many groups as could be needed if all were of the least size
        counts = random.integers(low, high + 1, -(-len(recordings) // low))
        offsets = np.concatenate([[0], np.cumsum(counts)])
        # the last group has what is left over, if that is enough
        offsets = offsets[offsets <= len(recordings)]
        if len(recordings) - offsets[-1] >= low:
            offsets = np.append(offsets, len(recordings))
        chosen = random.permutation(recordings)[: offsets[-1]]
        shortest, longest = self.silence
        silences = random.integers(shortest, longest + 1, len(chosen))
        return Utterances(chosen, offsets, silences, random.integers(shortest, longest + 1, len(offsets) - 1))


@final
class TargetTexts:
    """The labels or texts of recordings, which become class ids or tokens when a batch is made."""

    def __init__(self, shard: TokenShard, tokenizer: Tokenizer, class_ids: dict[str, int] | None) -> None:
        self._offsets = shard.offsets
        self._bytes = shard.tokens
        self._tokenizer = tokenizer
        self._labels: IntArray | None = None
        # all at once: a label without a class is found when data is opened, not in the midst of training
        if class_ids is not None:
            texts = map(self._text, range(shard.facts.documents))
            self._labels = np.array([class_id(class_ids, text, "the prepared recordings") for text in texts])

    def make_batch(self, features: Tensor, segments: Tensor | None, utterances: Sequence[IntArray]) -> AudioBatch:
        """The batch with these features, and the label or the joined texts of the recordings of each utterance."""
        if self._labels is not None:
            return AudioClassificationBatch(
                features, torch.from_numpy(self._labels[np.concatenate(utterances)]), segments
            )
        # texts are stored as bytes and encoded here, since joined ones are others in every epoch
        texts = EncodedTexts([" ".join(map(self._text, recordings)) for recordings in utterances], self._tokenizer)
        target, targets, target_segments = texts.targets(np.arange(len(utterances)))
        return TranscriptionBatch(features, target, targets, segments, target_segments)

    def _text(self, number: int) -> str:
        start, stop = self._offsets[number : number + 2]
        return self._bytes[start:stop].astype(np.uint8).tobytes().decode("utf-8", "replace")


@final
class RecordingArchive(NamedTuple):
    """The prepared recordings of a split: samples, targets, and the front end that computes features."""

    samples: TokenShard
    targets: TargetTexts
    front_end: LogMelFrontEnd


@final
class UtteranceDataset(SequenceDataset):
    """Utterances of prepared recordings; the length of each is its number of frames."""

    def __init__(self, archive: RecordingArchive, utterances: Utterances) -> None:
        self._archive = archive
        self._utterances = utterances
        self._levels = archive.samples.tokens
        self._starts = archive.samples.offsets
        # each recording with the silence before it
        parts = archive.samples.lengths[utterances.recordings] + utterances.silences
        self._samples = np.add.reduceat(parts, utterances.offsets[:-1]) + utterances.tails
        self.lengths = self.tie_breakers = archive.front_end.settings.frame_counts(self._samples)
        self.fingerprint = archive.samples.facts.sha256[:12]

    def make_batch(self, indices: IntArray) -> AudioBatch:
        lengths = self._samples[indices]
        # zeros are the silence between recordings, and the padding behind them
        waves = np.zeros((len(indices), int(lengths.max())), dtype=np.float32)
        recordings = []
        for wave, utterance in zip(waves, indices, strict=True):
            start, stop = self._utterances.offsets[utterance : utterance + 2]
            recordings.append(self._utterances.recordings[start:stop])
            self._fill(wave, recordings[-1], self._utterances.silences[start:stop])
        waves /= INT16_SCALE
        features = self._archive.front_end.features(torch.from_numpy(waves), lengths)
        frames = torch.from_numpy(self.lengths[indices])
        # 0 for frames and -1 for padding
        segments = -(torch.arange(features.shape[1]) >= frames[:, None]).long()
        has_padding = bool((segments < 0).any())
        return self._archive.targets.make_batch(features, segments if has_padding else None, recordings)

    def _fill(self, wave: NDArray[np.float32], recordings: IntArray, silences: IntArray) -> None:
        """Write the levels of recordings one after another, each after its silence."""
        position = 0
        for recording, silence in zip(recordings.tolist(), silences.tolist(), strict=True):
            # the shard holds 16-bit samples as numbers that are not negative
            levels = self._levels[self._starts[recording] : self._starts[recording + 1]]
            position += silence
            np.subtract(levels, INT16_SCALE, out=wave[position : position + len(levels)], dtype=np.float32)
            position += len(levels)


class _MaskedEpoch(BucketEpoch):
    """An epoch of training data whose features are masked at random."""

    def __init__(self, examples: UtteranceDataset, budget: int, masks: SpecAugment, seeds: tuple[int, int]) -> None:
        random = random_generator(*seeds)
        super().__init__(examples, random.permutation(len(examples.lengths)), budget, random)
        self._masks = masks
        self._seeds = seeds

    def batch(self, number: int) -> AudioBatch:
        batch = super().batch(number)
        assert isinstance(batch, AudioBatch)
        # seeded by the batch, so that a run that is resumed draws the same masks
        random = random_generator(*self._seeds, number, _MASKING_SEED)
        rows, length = batch.features.shape[:2]
        if batch.segments is None:
            frames = torch.full((rows,), length)
        else:
            frames = (batch.segments == 0).sum(1)
        return batch._replace(features=self._masks.apply(batch.features, frames.numpy(), random))


@final
class UtterancePlan(FixedEpochPlan):
    """Batches of at most `budget` padded frames; `joined` None makes an utterance of each recording.

    `recordings` are the numbers of those that are read, by default all. Joined recordings are drawn anew in each epoch
    of training, and always the same ones in the fixed epoch, which has no masks either."""

    def __init__(
        self,
        archive: RecordingArchive,
        budget: int,
        *,
        joined: JoinedRecordings | None = None,
        masks: SpecAugment = NO_MASKS,
        recordings: IntArray | None = None,
    ) -> None:
        self._archive = archive
        self._budget = budget
        self._joined = joined
        self._masks = masks
        if recordings is None:
            self.recordings = np.arange(archive.samples.facts.documents)
        else:
            self.recordings = recordings
        settings = f"{len(self.recordings)}-{joined}-{masks}-{budget}"
        self.fingerprint = f"{archive.samples.facts.sha256[:12]}-{settings}"

    @property
    def max_length(self) -> int:
        """The most frames that an utterance can have."""
        samples = self._archive.samples.lengths[self.recordings].max()
        if self._joined is not None:
            # the longest that could be drawn: batches of every epoch must fit
            samples = self._joined.counts[1] * (samples + self._joined.silence[1]) + self._joined.silence[1]
        return int(self._archive.front_end.settings.frame_counts(samples))

    def epoch(self, seed: int, number: int) -> BucketEpoch:
        return _MaskedEpoch(self._draw(random_generator(seed, number)), self._budget, self._masks, (seed, number))

    def fixed_epoch(self) -> BucketEpoch:
        """The fixed epoch of held-out data."""
        dataset = self._draw(random_generator(FIXED_SEED))
        return BucketEpoch(dataset, np.arange(len(dataset.lengths)), self._budget, random_generator(FIXED_SEED))

    def _draw(self, random: np.random.Generator) -> UtteranceDataset:
        if self._joined is not None:
            return UtteranceDataset(self._archive, self._joined.draw(self.recordings, random))
        return UtteranceDataset(self._archive, single_utterances(self.recordings))


def single_utterances(recordings: IntArray) -> Utterances:
    """Each recording as an utterance, without further silence."""
    none = np.zeros(len(recordings), dtype=np.int64)
    return Utterances(recordings, np.arange(len(recordings) + 1), none, none)
