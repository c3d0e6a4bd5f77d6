"""Parts that the public speedruns of small language models have settled on, put into a decoder of attention layers."""

from collections.abc import Iterator
from typing import Annotated, NamedTuple, TypedDict

from annotated_types import Gt
from torch import nn

from manyformer.base.errors import UserError
from manyformer.base.keyword_checks import Default
from manyformer.models import LanguageModel
from manyformer.nn.attention.attention import Attention
from manyformer.nn.attention.value_stages import ValueEmbedding, ValueResidual
from manyformer.nn.convolution.token_neighbours import ConvolvedHidden, ConvolvedInput, Smear
from manyformer.nn.core import Chain, Layer
from manyformer.nn.feed_forward.feedforward import FeedForward, GatedFeedForward
from manyformer.nn.residual import Residual
from manyformer.nn.streams import DepthSkips, StreamLayer, StreamStack

LogitCap = Annotated[
    Annotated[float, Gt(0)] | None, "logits z become cap tanh(z / cap) (Gemma 2: 30); null means no cap"
]
ZeroOutputs = Annotated[bool, "output matrices of branches begin as zeros, so that every layer begins as the identity"]
EmbeddingSkip = Annotated[bool, "every layer reads a learned mixture of the stream and the embedding"]
ValueEmbeddings = Annotated[
    bool, "every second layer, the last included, adds a gated vector of the token itself to its values"
]
ValueSharing = Annotated[bool, "every layer mixes its values with those of the first one (ResFormer)"]
SmearedEmbedding = Annotated[bool, "the embedding of the token before is added to a token's, through a learned gate"]
Backout = Annotated[bool, "in the end the output of the middle layer is subtracted, times a learned number"]
UNetSkips = Annotated[bool, "layers of the upper half add the outputs of those of the lower half, in reverse order"]
CanonPlaces = Annotated[
    str,
    "places of short convolutions, any letters of ABCD: before attention (A), on queries, keys and values (B), before "
    "the feed-forward layer (C) and inside it (D)",
]


class SpeedrunParts(TypedDict, total=False):
    """The parts as keywords, all of them off; `baseline-2026` has the same ones, most of them on."""

    zero_outputs: Annotated[ZeroOutputs, Default(value=False)]
    embedding_skip: Annotated[EmbeddingSkip, Default(value=False)]
    value_embeddings: Annotated[ValueEmbeddings, Default(value=False)]
    value_residual: Annotated[ValueSharing, Default(value=False)]
    smear: Annotated[SmearedEmbedding, Default(value=False)]
    backout: Annotated[Backout, Default(value=False)]
    unet_skips: Annotated[UNetSkips, Default(value=False)]
    canon: Annotated[CanonPlaces, Default("")]


COMPUTED_PARTS = frozenset(SpeedrunParts.__annotations__) - {"zero_outputs"}
"""The keywords of parts that compute something, not only initial weights."""


class _Branches(NamedTuple):
    """The residual branches of one layer, those that mix tokens and those that do not."""

    mixers: list[Residual]
    feed_forward: list[Residual]


def add_speedrun_parts(
    model: LanguageModel,
    *,
    zero_outputs: bool = False,
    embedding_skip: bool = False,
    value_embeddings: bool = False,
    value_residual: bool = False,
    smear: bool = False,
    backout: bool = False,
    unet_skips: bool = False,
    canon: str = "",
) -> LanguageModel:
    """The model with these parts, in place: a decoder of pre-norm layers of attention and feed-forward branches.

    Raises UserError for layers that a part cannot be put into."""
    requested = {
        "embedding_skip": embedding_skip,
        "value_embeddings": value_embeddings,
        "value_residual": value_residual,
        "smear": smear,
        "backout": backout,
        "unet_skips": unet_skips,
        "canon": canon,
    }
    settings = ", ".join(f"{name}={value}" for name, value in requested.items() if value)
    if settings:
        body = model.body
        layers = _check_stack(body, settings)
        dim = model.embed.token.embedding_dim
        _check_letters(canon)
        for number, layer in enumerate(layers):
            branches = _branches_of(layer)
            for branch in branches.mixers:
                has_table = value_embeddings and (len(layers) - 1 - number) % 2 == 0
                _change_values(branch.inner, model.vocab, dim, has_table=has_table, mixes=value_residual, number=number)
            _add_convolutions(branches, dim, canon)
        if embedding_skip or value_residual or smear or backout or unet_skips:
            rule = DepthSkips(len(layers), from_embedding=embedding_skip, across=unet_skips, backout=backout)
            model.body = _with_rule(body, rule, Smear(dim) if smear else None)
        # what layers read of a call may have changed
        model.set_head(model.head, model.auxiliary)
    if zero_outputs:
        for name, module in model.body.named_modules():
            if isinstance(module, nn.Linear) and name.endswith((".out_proj", ".down")):
                for weight in module.parameters():
                    nn.init.zeros_(weight)
    return model


def _check_letters(canon: str) -> None:
    if set(canon) - set("ABCD") or len(set(canon)) < len(canon):
        raise UserError(f"canon ('{canon}') names places of convolutions, each letter of ABCD at most once")


def _check_stack(body: Layer, settings: str) -> list[Chain]:
    """The layers of a plain stack. Raises UserError for any other, which these parts cannot be put into."""
    parts: list[nn.Module] = []
    if isinstance(body, Chain):
        parts = [layer for name, layer in body.named_children() if name.isdigit()]
        if body.places is not None:
            raise UserError(
                f"{settings}: layers that are applied several times (loops, shared_layers) cannot have them"
            )
    if not parts:
        raise UserError(
            f"{settings} needs residual_streams=plain: layers of one stream that are applied one after another"
        )
    layers: list[Chain] = []
    for layer in parts:
        if not isinstance(layer, Chain) or not all(
            isinstance(part, Residual) and part.only_adds for part in layer.children()
        ):
            raise UserError(
                f"{settings} needs layers whose branches are only added: norm_order=pre or sandwich, and no gates"
            )
        layers.append(layer)
    return layers


def _branches_of(layer: Chain) -> _Branches:
    mixers: list[Residual] = []
    feed_forward: list[Residual] = []
    for name, branch in _named_layers(layer):
        assert isinstance(branch, Residual)
        (feed_forward if name == "ff" else mixers).append(branch)
    return _Branches(mixers, feed_forward)


def _change_values(mixer: Layer, vocab: int, dim: int, *, has_table: bool, mixes: bool, number: int) -> None:
    """Give a layer its stages of values: the mixture with those of the first layer, then the vectors of tokens."""
    if not (has_table or mixes):
        return
    if not isinstance(mixer, Attention):
        raise UserError(
            f"value_embeddings and value_residual change projected values: a {type(mixer).__name__} has none"
        )
    kv_heads, _, value_dim = mixer.kv_shape
    stages: list[ValueResidual | ValueEmbedding] = []
    if mixes:
        stages.append(ValueResidual(is_first=number == 0))
    if has_table:
        stages.append(ValueEmbedding(vocab, dim, kv_heads, value_dim))
    try:
        mixer.set_value_stages(stages)
    except ValueError as error:
        raise UserError(f"value_embeddings and value_residual change projected values: {error}") from None


def _add_convolutions(branches: _Branches, dim: int, canon: str) -> None:
    """Put short convolutions into the branches of a layer, at the places that `canon` names."""
    for branch in branches.mixers:
        mixer = branch.inner
        if "B" in canon:
            if not isinstance(mixer, Attention):
                raise UserError(f"canon B convolves queries, keys and values, and a {type(mixer).__name__} has none")
            try:
                mixer.set_convolution(4)
            except ValueError as error:
                raise UserError(f"canon B convolves queries, keys and values: {error}") from None
        if "A" in canon:
            branch.inner = ConvolvedInput(mixer, dim)
    for branch in branches.feed_forward:
        if "D" in canon:
            if not isinstance(branch.inner, FeedForward | GatedFeedForward):
                raise UserError(f"canon D convolves hidden channels, and a {type(branch.inner).__name__} has none")
            branch.inner = ConvolvedHidden(branch.inner)
        if "C" in canon:
            branch.inner = ConvolvedInput(branch.inner, dim)
        branch.keeps_tokens = branch.inner.keeps_tokens


def _with_rule(body: Layer, rule: DepthSkips, smear: Smear | None) -> StreamStack:
    """The layers of a chain as a stack with a rule, under the same names."""
    layers: dict[str, Layer] = {}
    if smear is not None:
        layers["smear"] = smear
    for name, layer in body.named_children():
        assert isinstance(layer, Layer)
        if name.isdigit():
            layer = StreamLayer(**dict(_named_layers(layer)))
        layers[name] = layer
    return StreamStack(rule, **layers)


def _named_layers(layer: Layer) -> Iterator[tuple[str, Layer]]:
    for name, part in layer.named_children():
        assert isinstance(part, Layer)
        yield name, part
