"""Writing with a masked diffusion: `denoise(model, prompts, ...)` continues prompts and fills the gaps of texts.

A `Sampler` decides in which order hidden tokens become visible."""

from typing import TYPE_CHECKING

from manyformer.base.lazy_names import offer_names as _offer_names

if TYPE_CHECKING:
    from manyformer.inference.denoising.denoise import DenoisingResult, FilledText, denoise
    from manyformer.inference.denoising.samplers import (
        SAMPLERS,
        AncestralSampler,
        FirstHittingSampler,
        LowConfidenceSampler,
        Sampler,
    )

_MODULES = {
    "AncestralSampler": "manyformer.inference.denoising.samplers",
    "DenoisingResult": "manyformer.inference.denoising.denoise",
    "FilledText": "manyformer.inference.denoising.denoise",
    "FirstHittingSampler": "manyformer.inference.denoising.samplers",
    "LowConfidenceSampler": "manyformer.inference.denoising.samplers",
    "SAMPLERS": "manyformer.inference.denoising.samplers",
    "Sampler": "manyformer.inference.denoising.samplers",
    "denoise": "manyformer.inference.denoising.denoise",
}

__all__ = [
    "SAMPLERS",
    "AncestralSampler",
    "DenoisingResult",
    "FilledText",
    "FirstHittingSampler",
    "LowConfidenceSampler",
    "Sampler",
    "denoise",
]


_offer_names(__name__, _MODULES)
