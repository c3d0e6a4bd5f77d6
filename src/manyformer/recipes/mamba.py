"""Mamba: a selective state space model, a language model of gated scans alone."""

from typing import Annotated

from manyformer.models import LanguageModel
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.core import Layer
from manyformer.nn.recurrent.mamba_mixer import MambaMixer, default_rank
from manyformer.recipes.parts.baselines import rms_decoder
from manyformer.recipes.parts.keywords import (
    ChannelConvolutionSize,
    ChannelExpansion,
    ChannelMemorySize,
    NormEps,
    StepRank,
    TiedOutput,
)
from manyformer.recipes.parts.registry import recipe


@recipe(
    "Mamba",
    paper="Gu and Dao 2023, Mamba: Linear-Time Sequence Modeling with Selective State Spaces, arXiv:2312.00752",
    summary="A state space model whose step sizes and inputs depend on the token, one small memory for each channel.",
    task=LANGUAGE_MODELLING,
    family="linear",
    constant_state=True,
    cost="O(l d (d + state)) per layer, of which the scan is one token after another; O(d (d + state)) per generated "
    "token, at any length",
    reasons={
        "heads": "it scans channels, without attention",
        "attention_maps": "it scans channels, without attention",
    },
    tiny_keywords={"state_dim": 4, "step_rank": 3},
)
def mamba(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 16,
    state_dim: ChannelMemorySize = 16,
    expansion: ChannelExpansion = 2,
    conv_size: ChannelConvolutionSize = 4,
    step_rank: StepRank = None,
    norm_eps: NormEps = 1e-5,
    dropout: float = 0.0,
    *,
    tied: TiedOutput = True,
    negative_eigenvalues: Annotated[
        bool, "factors of a memory from -1 to 1, so that it can track parity, instead of from 0 to 1"
    ] = False,
) -> LanguageModel:
    """Layers of short convolution, selective scan and gate, without attention, feed-forward layers and positions.

    Sections 3.2 to 3.4. The smallest of the published models has dim=768 and depth=24, the largest 2560 and 64.
    `negative_eigenvalues` is not theirs (Grazzi et al. 2024, arXiv:2411.12537, section 4)."""

    def layer(number: int) -> dict[str, Layer]:
        if step_rank is None:
            # the paper's dim / 16: the step of each channel is a product of two narrow matrices
            rank = default_rank(dim)
        else:
            rank = step_rank
        # figure 3: two branches of expansion * dim channels, one through convolution and scan, the other its gate
        mixer = MambaMixer(
            dim,
            expansion * dim,
            state_dim=state_dim,
            rank=rank,
            conv_size=conv_size,
            negative_eigenvalues=negative_eigenvalues,
        )
        return {"mixer": mixer}

    return rms_decoder(vocab, dim, depth, layer, dropout=dropout, norm_eps=norm_eps, tied=tied)
