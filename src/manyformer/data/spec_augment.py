"""SpecAugment: masks of random bands and frames of log-mel features."""

from typing import NamedTuple, final

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from manyformer.type_aliases import IntArray


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
        widths = np.minimum(self.time_mask_width, (self.time_mask_share * frames).astype(np.int64))
        masked_frames = self._draw(self.time_masks, widths, frames, features.shape[1], random)
        return features.masked_fill(masked_bands[:, None] | masked_frames[..., None], 0.0)

    @staticmethod
    def _draw(
        masks: int, widths: IntArray, lengths: IntArray, size: int, random: np.random.Generator
    ) -> Bool[Tensor, "b size"]:
        """Which of `size` columns the masks of each row cover; each lies within the first `lengths[r]` of them."""
        width = random.integers(0, widths[:, None] + 1, (len(widths), masks))
        start = random.integers(0, lengths[:, None] - width + 1)
        columns = np.arange(size)[:, None]
        covered = (columns >= start[:, None]) & (columns < (start + width)[:, None])
        return torch.from_numpy(covered.any(-1))


NO_MASKS = SpecAugment()
