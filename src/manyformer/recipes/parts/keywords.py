"""Keywords that several recipes share: their types, bounds and meanings."""

import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, Unpack, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from manyformer.base.keyword_checks import Default as Default
from manyformer.nn.residual import GateName

PositiveSize = Annotated[int, Ge(1)]

ActionCount = Annotated[
    PositiveSize, "number of actions, or of the numbers of a continuous action; the environment decides it in a run"
]
BlockLength = Annotated[PositiveSize, "number of positions in a block"]
BalanceWeight = Annotated[
    float, Ge(0), "weight of the loss that spreads tokens over experts, in each layer; 0 means none"
]
ClampLength = Annotated[
    PositiveSize | None, "relative distances are clamped to this many tokens; null means not clamped"
]
ContinuousActions = Annotated[
    bool, "actions are vectors with a normal distribution instead of a choice; the environment decides it in a run"
]
DecoderDepth = Annotated[PositiveSize | None, "number of layers of the decoder; null means as many as the encoder has"]
ExpertCount = Annotated[PositiveSize, "number of experts, feed-forward networks among which a router chooses"]
ExpertDim = Annotated[PositiveSize, "width of the hidden layer of an expert"]
ExpertWeights = Annotated[
    Literal["scores", "renormalized"], "weights of a token's experts: their scores, or their shares of the sum"
]
ExpertsPerToken = Annotated[PositiveSize, "number of experts that process a token"]
ShortConvolutionSize = Annotated[
    PositiveSize, "number of tokens in the short convolution of queries, keys and values; 1 is the token alone"
]
HeadDim = Annotated[PositiveSize | None, "width of a head; null means dim / heads"]
FeedForwardChunk = Annotated[
    PositiveSize | None, "number of tokens that a feed-forward layer computes at a time, to save memory; null means all"
]
FeatureCount = Annotated[
    PositiveSize, "number of random features for each head: more features approximate softmax better"
]
FeatureRedraw = Annotated[
    PositiveSize | None, "training steps after which random features are drawn again; null means never"
]
GateBias = Annotated[
    float,
    Ge(0),
    "initial bias b of gates: the larger, the closer a layer is to the identity; residual and input have none",
]
GeluApproximation = Annotated[
    Literal["none", "tanh"],
    "the exact GELU (none), or its tanh approximation, which some published weights were trained with",
]
ImageChannels = Annotated[PositiveSize, "1 for grayscale images, 3 for color; the data decides it in a run"]
ImageHeight = Annotated[PositiveSize, "height of images; the data decides it in a run"]
ImageWidth = Annotated[PositiveSize, "width of images; the data decides it in a run"]
PatchSide = Annotated[PositiveSize, "height and width of a patch"]
KeyHeads = Annotated[PositiveSize | None, "heads of queries and keys, each shared by adjacent heads; null means heads"]
MaxRelativeDistance = Annotated[PositiveSize, "relative distances are clipped to this many tokens"]
MemoryContext = Annotated[
    Literal["growing", "same-length"],
    "attention to the whole memory and segment (growing), or to memory_length tokens for every token (same-length)",
]
MemoryLength = Annotated[PositiveSize, "number of earlier tokens whose states a layer caches as memory"]
MemoryLengthOrNone = Annotated[
    PositiveSize | None, "number of earlier tokens whose states a layer caches as memory; null means no memory"
]
FrameHalvings = Annotated[int, Ge(0), Le(6), "number of convolutions that halve the frames: 2 make a token of 4 frames"]
FrameChannels = Annotated[
    PositiveSize | None, "number of channels of the convolutions that shorten the frames; null means dim"
]
ProjectedLength = Annotated[
    PositiveSize | None, "number of projected keys that replace all keys, in the lowest layer; null means no projection"
]
MelBands = Annotated[PositiveSize, "number of mel bands of a frame; the data decides it in a run"]
NormEps = Annotated[float, Gt(0), "number added to the variance, or the mean square, under the root of norms"]
NegativeEigenvalues = Annotated[
    bool, "corrections of up to twice a token's error, so that a memory can track parity, instead of up to once"
]
NodeFeatureCount = Annotated[PositiveSize, "number of features of a node; the data decides it in a run"]
ObservationShape = Annotated[
    PositiveSize | str,
    "size of an observed vector, or HEIGHTxWIDTHxCHANNELS of images; the environment decides it in a run",
]
PreviousInputs = Annotated[bool, "the policy also reads the previous action and reward"]
SentenceTypeCount = Annotated[
    PositiveSize | None, "number of vectors for the sentences of a row, 2 in BERT; null means none"
]
RopeBase = Annotated[float, Gt(0), "base of the frequencies of rotary positions"]
TiedOutput = Annotated[bool, "the output has the matrix of the embedding"]
UnscaledLength = Annotated[PositiveSize, "length before the scaling of rotary positions"]
YarnFactor = Annotated[float, Ge(1), "factor by which YaRN extends original_length; 1 means no scaling"]
RouterZWeight = Annotated[float, Ge(0), "weight of the loss that keeps the logits of routers small; 0 means none"]
ResidualGate = Annotated[GateName, "how a branch joins the residual stream: as a sum (residual) or by a gate"]
ValueDim = Annotated[PositiveSize | None, "width of a head's values; null means dim / heads"]
WindowOnEachSide = Annotated[PositiveSize, "number of positions in the attention window on each side of a token"]
CausalWindowSize = Annotated[PositiveSize, "number of positions in the attention window: a token and those before it"]
CausalWindowOrNone = Annotated[CausalWindowSize | None, "positions in an attention window; null means all"]
BalanceBiasStep = Annotated[float, Ge(0), "change of the bias that balances experts, after each training step"]
ChannelConvolutionSize = Annotated[PositiveSize, "number of tokens in the short convolution; 1 is the token alone"]
ChannelExpansion = Annotated[PositiveSize, "number of channels with a memory, as a multiple of dim"]
ChannelMemorySize = Annotated[PositiveSize, "entries in the memory of each channel"]
DeltaHeads = Annotated[PositiveSize, "heads of values in layers of the delta rule"]
DeltaKeyDim = Annotated[PositiveSize, "width of a head's queries and keys there"]
DeltaKeyHeads = Annotated[PositiveSize, "heads of queries and keys there, each shared by adjacent heads"]
DeltaPattern = Annotated[str, "kinds of layers, repeated: L has the gated delta rule, F attends to all tokens"]
DeltaValueDim = Annotated[PositiveSize, "width of a head's values there"]
DenseLayerCount = Annotated[int, Ge(0), "number of first layers without experts"]
ExpertWeightFactor = Annotated[float, Gt(0), "factor of the weights of a token's experts"]
LatentDim = Annotated[PositiveSize, "width of the latent of keys and values, which is cached"]
QuarterRotatedDim = Annotated[
    PositiveSize | None, "number of channels of a head with rotary positions; null means a quarter of them"
]
SharedExpertCount = Annotated[PositiveSize, "number of experts that process every token, as one of their width"]
SharedExpertDim = Annotated[PositiveSize, "width of the hidden layer of the expert of every token"]
StateSpaceGroups = Annotated[PositiveSize, "heads of queries and keys of Mamba-2, each shared by adjacent heads"]
StateSpaceHeadDim = Annotated[PositiveSize, "width of a head's values in Mamba-2"]
StateSpaceHeads = Annotated[PositiveSize, "heads of Mamba-2"]
StateSpaceKeyDim = Annotated[PositiveSize, "width of queries and keys of Mamba-2"]
StepRank = Annotated[
    PositiveSize | None, "width between the channels and their step sizes; null means dim / 16, rounded up"
]
ValueExpansion = Annotated[PositiveSize, "width of the values of all heads, as a multiple of dim"]

COMMON_KEYWORDS: dict[str, tuple[Any, ...]] = {
    "vocab": (Ge(1), "number of token ids; the data decides it in a run"),
    "source_vocab": (Ge(1), "number of source token ids; null means one vocabulary for source and target"),
    "classes": (Ge(1), "number of labels; the data decides it in a run"),
    "dim": (Ge(1), "width of the residual stream"),
    "depth": (
        Ge(1),
        "number of layers (on each side of an encoder-decoder), or the maximum number of steps of a repeated layer",
    ),
    "heads": (Ge(1), "number of attention heads"),
    "kv_heads": (
        Ge(1),
        "number of key and value heads, each shared by a group of query heads; null means as many as heads",
    ),
    "ff_dim": (Ge(1), "width of the hidden layer of feed-forward layers; null means the paper's multiple of dim"),
    "max_length": (Ge(1), "longest sequence that learned positions allow; a run takes it from the data unless given"),
    "dropout": (Ge(0), Lt(1), "dropout probability"),
    "norm_order": (
        "normalization after each residual sum (post), before each branch (pre), or before and after it (sandwich)",
    ),
}
"""Bounds and meanings of the keywords that nearly all recipes have; a recipe writes their plain types."""


def keyword_signature(function: Callable[..., Any]) -> inspect.Signature:
    """The signature of a recipe: each keyword with its bounds and meaning, records of shared keywords expanded.

    A record is a TypedDict whose types contain defaults, of which a recipe takes all keywords with
    `**options: Unpack[Options]`."""
    signature = inspect.signature(function)
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        # one record stands for all of its keywords
        if get_origin(parameter.annotation) is Unpack:
            parameters += record_parameters(get_args(parameter.annotation)[0])
        else:
            annotation = keyword_annotation(parameter.name, parameter.annotation)
            parameters.append(parameter.replace(annotation=annotation))
    return signature.replace(parameters=parameters)


def record_parameters(record: type) -> Iterator[inspect.Parameter]:
    """The keywords of a record, whose types contain their defaults."""
    for name, annotation in get_type_hints(record, include_extras=True).items():
        inner, *metadata = get_args(annotation)
        # TypedDicts have no defaults, so the type of each key carries its own
        (default,) = (item.value for item in metadata if isinstance(item, Default))
        metadata = [item for item in metadata if not isinstance(item, Default)]
        plain = Annotated[inner, *metadata] if metadata else inner
        yield inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=keyword_annotation(name, plain)
        )


def keyword_annotation(name: str, annotation: Any) -> Any:
    """The type of a keyword with its bounds and meaning, which a common keyword gets from COMMON_KEYWORDS."""
    # a recipe that says what a common keyword means for it is not overruled
    if get_origin(annotation) is Annotated or name not in COMMON_KEYWORDS:
        return annotation
    return Annotated[annotation, *COMMON_KEYWORDS[name]]
