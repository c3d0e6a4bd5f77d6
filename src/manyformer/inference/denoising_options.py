"""The options by which a diffusion fills hidden tokens, written once: keywords of `denoise` and of the command line."""

from typing import Annotated, Literal, TypedDict

from annotated_types import Ge, Le

SamplerName = Literal["ancestral", "first-hitting", "low-confidence"]
"""In which order hidden tokens become visible: at random times, one by one at random, or the most probable first."""


class DenoisingOptions(TypedDict, total=False):
    """The flat options of a diffusion with bounds and meanings; None and a missing option mean the same."""

    max_new: Annotated[
        int | None,
        Ge(1),
        Le(1_000_000),
        "Hidden tokens after the prompt; none after one with gaps unless given, else 256, or fewer at max_length.",
    ]
    gap: Annotated[
        str | None, "Each of these in a prompt is a hidden token to fill, as _ in 'The ___ sat'; none unless given."
    ]
    sampler: Annotated[
        SamplerName | None,
        "Order of filling: ancestral (random times, unless given), first-hitting (one by one), low-confidence (LLaDA).",
    ]
    steps: Annotated[int | None, Ge(1), Le(1_000_000), "Steps in which all is filled; one for each token unless given."]
    block: Annotated[int | None, Ge(1), "Fill blocks of so many tokens from left to right; all at once unless given."]
    temperature: Annotated[
        float | None,
        Ge(0),
        "Below 1 favors probable tokens; 0 takes the most probable one at each place; 1 unless given.",
    ]
    seed: Annotated[int | None, Ge(0), Le(2**63 - 1), "The same seed gives the same text."]
    samples: Annotated[int | None, Ge(1), Le(100_000), "Number of texts for each prompt; 1 unless given."]
    use_cache: Annotated[
        bool | None, "Keep keys and values of finished blocks, for a model of blocks; it does unless this is False."
    ]
