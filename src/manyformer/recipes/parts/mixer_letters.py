"""The letters of mixers in a pattern of layers: each is the layer of one recipe, made from the sizes of a model.

A new mixer is one line of `MIXER_LETTERS`. Letters whose layers depend on positions or kernels are those of `compose`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, NamedTuple, TypedDict

from manyformer.base.errors import UserError
from manyformer.base.keyword_checks import Default
from manyformer.nn.convolution.gated_convolution import GatedConvolution
from manyformer.nn.feed_forward import GatedExperts, LoadBalanceLoss, MixtureOfExperts, SoftmaxRouter
from manyformer.nn.feed_forward.feedforward import default_gated_dim
from manyformer.nn.linear.recurrent_rules import DecayBounds
from manyformer.nn.positions import RotaryPosition
from manyformer.nn.recurrent.lstm import LSTM
from manyformer.nn.recurrent.mamba_3_mixer import Mamba3Mixer
from manyformer.nn.recurrent.mamba_mixer import MambaMixer, default_rank
from manyformer.recipes.deltanet import plain_delta_attention
from manyformer.recipes.gla import gated_linear_attention
from manyformer.recipes.hgrn2 import tied_decay_attention
from manyformer.recipes.kda import kimi_delta_attention
from manyformer.recipes.lightning import lightning_attention
from manyformer.recipes.mlstm import matrix_lstm_attention
from manyformer.recipes.parts.keywords import PositiveSize
from manyformer.recipes.parts.layer_patterns import EXPERTS, LayerKind, MixerMaker
from manyformer.recipes.parts.recurrent_layers import (
    RecurrentSizes,
    delta_product_attention,
    erase_write_attention,
    feedback_attention,
    gated_delta_attention,
    state_space_attention,
)
from manyformer.recipes.retnet import retention

SHORT_CONVOLUTION = 4
"""The tokens of the short convolutions of recurrent layers, in all of their papers."""


class MixerKeywords(TypedDict, total=False):
    """What the mixers of a pattern have besides the model's sizes; null means what the mixer's own recipe has."""

    window: Annotated[
        PositiveSize | None, "positions in the window of layers W: a token and those before it", Default(None)
    ]
    memory_heads: Annotated[PositiveSize | None, "heads of recurrent layers; null means heads", Default(None)]
    memory_key_heads: Annotated[
        PositiveSize | None, "heads of queries and keys of layers D and M, each shared by adjacent heads", Default(None)
    ]
    memory_key_dim: Annotated[PositiveSize | None, "width of a head's keys in recurrent layers", Default(None)]
    memory_value_dim: Annotated[
        PositiveSize | None, "width of a head's values in layers D, P, X, V and M", Default(None)
    ]
    state_dim: Annotated[
        PositiveSize | None,
        "entries in the memory of a channel: 128 in Mamba-2 (M) and -3 (T), 16 in Mamba (m)",
        Default(None),
    ]
    conv_size: Annotated[PositiveSize | None, "tokens in the short convolutions of layers", Default(None)]
    negative_eigenvalues: Annotated[
        bool,
        "corrections of layers D, d and X are up to twice a token's error, instead of up to once, and memories of m "
        "may change their sign",
        Default(value=False),
    ]
    num_experts: Annotated[PositiveSize | None, "number of experts of layers E; null means 8", Default(None)]
    experts_per_token: Annotated[PositiveSize | None, "experts that process a token; null means 2", Default(None)]
    expert_dim: Annotated[PositiveSize | None, "width of an expert's hidden layer; null means 8/3 dim", Default(None)]


class MixerSizes(NamedTuple):
    """The sizes of a model that its mixers are made from, and the keywords that are theirs alone."""

    dim: int
    depth: int
    heads: int
    options: Mapping[str, Any]

    def option(self, name: str, default: Any = None) -> Any:
        """The value of a keyword of mixers, `default` for null."""
        value = self.options.get(name)
        return default if value is None else value

    def square(self) -> RecurrentSizes:
        """The sizes of heads whose keys are as wide as their values."""
        key_dim = self.option("memory_key_dim")
        return RecurrentSizes.of(self.dim, self.option("memory_heads", self.heads), key_dim, key_dim)

    def free(self) -> RecurrentSizes:
        """The sizes of heads whose keys, values and number of key heads are chosen each."""
        return RecurrentSizes.of(
            self.dim,
            self.option("memory_heads", self.heads),
            self.option("memory_key_dim"),
            self.option("memory_value_dim"),
            self.option("memory_key_heads"),
        )

    def narrow(self) -> RecurrentSizes:
        """The sizes of heads whose keys have half of the width of values."""
        heads = self.option("memory_heads", self.heads)
        return RecurrentSizes.with_narrow_keys(self.dim, heads, self.option("memory_key_dim"))

    @property
    def conv_size(self) -> int:
        """The tokens of a short convolution before a memory."""
        size: int = self.option("conv_size", SHORT_CONVOLUTION)
        return size

    @property
    def max_strength(self) -> float:
        """The largest share of a correction by the delta rule."""
        return 2.0 if self.option("negative_eigenvalues", default=False) else 1.0


class MixerLetter(NamedTuple):
    """A mixer's name, the keywords that it reads, and its maker of the layers of a model of some sizes."""

    meaning: str
    keywords: frozenset[str]
    maker: Callable[[MixerSizes], MixerMaker]


def _mamba_2(sizes: MixerSizes) -> MixerMaker:
    heads = sizes.option("memory_heads", sizes.heads)
    value_dim = sizes.option("memory_value_dim")
    if value_dim is None:
        if 2 * sizes.dim % heads:
            raise UserError(f"the heads of layers M ({heads}) must divide 2 dim ({2 * sizes.dim})")
        value_dim = 2 * sizes.dim // heads
    key_heads = sizes.option("memory_key_heads", 1)
    widths = RecurrentSizes(sizes.dim, heads, sizes.option("state_dim", 128), value_dim, key_heads)
    return lambda number: state_space_attention(_checked(widths), conv_size=sizes.conv_size)


def _mamba(sizes: MixerSizes) -> MixerMaker:
    make = partial(
        MambaMixer,
        sizes.dim,
        2 * sizes.dim,
        state_dim=sizes.option("state_dim", 16),
        rank=default_rank(sizes.dim),
        conv_size=sizes.conv_size,
        negative_eigenvalues=sizes.option("negative_eigenvalues", default=False),
    )
    return lambda number: make()


def _mamba_3(sizes: MixerSizes) -> MixerMaker:
    heads = sizes.option("memory_heads", sizes.heads)
    if 2 * sizes.dim % heads:
        raise UserError(f"the heads of layers T ({heads}) must divide 2 dim ({2 * sizes.dim})")
    state_dim = sizes.option("state_dim", 128)
    if state_dim % 4:
        raise UserError(
            f"state_dim ({state_dim}) must be a multiple of 4 for layers T, which rotate half of it in pairs"
        )
    make = partial(Mamba3Mixer, sizes.dim, heads, value_dim=2 * sizes.dim // heads, state_dim=state_dim)
    return lambda number: make()


def _gated_delta(sizes: MixerSizes) -> MixerMaker:
    widths = _checked(sizes.free())
    make = partial(gated_delta_attention, widths, conv_size=sizes.conv_size, max_strength=sizes.max_strength)
    return lambda number: make()


def _delta(sizes: MixerSizes) -> MixerMaker:
    make = partial(plain_delta_attention, sizes.square(), conv_size=sizes.conv_size, max_strength=sizes.max_strength)
    return lambda number: make()


def _delta_product(sizes: MixerSizes) -> MixerMaker:
    # two reflections, the fewest that rotate a memory
    make = partial(delta_product_attention, _unshared(sizes), 2, conv_size=sizes.conv_size)
    return lambda number: make()


def _erase_write(sizes: MixerSizes) -> MixerMaker:
    make = partial(erase_write_attention, _unshared(sizes), conv_size=sizes.conv_size, max_strength=sizes.max_strength)
    return lambda number: make()


def _feedback(sizes: MixerSizes) -> MixerMaker:
    make = partial(feedback_attention, _unshared(sizes), conv_size=sizes.conv_size)
    return lambda number: make()


def _unshared(sizes: MixerSizes) -> RecurrentSizes:
    """The sizes of heads that have keys and values of chosen widths, and share neither."""
    widths = sizes.free()
    return widths._replace(key_heads=widths.heads)


def _retention(sizes: MixerSizes) -> MixerMaker:
    widths = sizes.square()
    # one table of rotations for all layers
    position = RotaryPosition(widths.head_dim)
    return lambda number: retention(widths, position)


def _hgrn2(sizes: MixerSizes) -> MixerMaker:
    widths = sizes.square()
    # the bounds of all layers come from one table
    bounds = DecayBounds(sizes.depth, widths.heads, widths.head_dim)
    return lambda number: tied_decay_attention(widths, bounds, number)


def _checked(widths: RecurrentSizes) -> RecurrentSizes:
    if widths.heads % widths.key_heads:
        raise UserError(f"memory_key_heads ({widths.key_heads}) must divide the heads of the memory ({widths.heads})")
    return widths


_HEADS = frozenset({"memory_heads"})
_HEADS_AND_KEYS = frozenset({"memory_heads", "memory_key_dim"})
_CONVOLVED = _HEADS_AND_KEYS | {"conv_size"}

MIXER_LETTERS: dict[str, MixerLetter] = {
    "D": MixerLetter(
        "gated delta rule",
        _CONVOLVED | {"memory_key_heads", "memory_value_dim", "negative_eigenvalues"},
        _gated_delta,
    ),
    "d": MixerLetter("delta rule", _CONVOLVED | {"negative_eigenvalues"}, _delta),
    "A": MixerLetter(
        "Kimi Delta Attention",
        _CONVOLVED,
        lambda sizes: lambda number: kimi_delta_attention(sizes.square(), conv_size=sizes.conv_size),
    ),
    "P": MixerLetter("gated delta product", _CONVOLVED | {"memory_value_dim"}, _delta_product),
    "X": MixerLetter("Gated DeltaNet-2", _CONVOLVED | {"memory_value_dim", "negative_eigenvalues"}, _erase_write),
    "V": MixerLetter("Comba", _CONVOLVED | {"memory_value_dim"}, _feedback),
    "M": MixerLetter("Mamba-2", _HEADS | {"memory_key_heads", "memory_value_dim", "state_dim", "conv_size"}, _mamba_2),
    "m": MixerLetter("Mamba", frozenset({"state_dim", "conv_size", "negative_eigenvalues"}), _mamba),
    "T": MixerLetter("Mamba-3", _HEADS | {"state_dim"}, _mamba_3),
    "R": MixerLetter("retention", _HEADS_AND_KEYS, _retention),
    "G": MixerLetter(
        "gated linear attention",
        _HEADS_AND_KEYS,
        lambda sizes: lambda number: gated_linear_attention(sizes.narrow()),
    ),
    "H": MixerLetter("HGRN2", _HEADS_AND_KEYS, _hgrn2),
    "L": MixerLetter(
        "lightning attention",
        _HEADS_AND_KEYS,
        lambda sizes: lambda number: lightning_attention(sizes.square(), number, sizes.depth),
    ),
    "S": MixerLetter("mLSTM", _HEADS_AND_KEYS, lambda sizes: lambda number: matrix_lstm_attention(sizes.narrow())),
    "l": MixerLetter("LSTM", frozenset(), lambda sizes: lambda number: LSTM(sizes.dim)),
    "C": MixerLetter(
        "gated short convolution",
        frozenset({"conv_size"}),
        lambda sizes: lambda number: GatedConvolution(sizes.dim, sizes.option("conv_size", 3)),
    ),
}
"""The mixers that need nothing but sizes, by their letters. A plug-in may add some."""

EXPERT_KEYWORDS = frozenset({"num_experts", "experts_per_token", "expert_dim"})
"""The keywords of layers of experts."""


def make_experts(sizes: MixerSizes) -> MixtureOfExperts:
    """The experts of one layer, as in Mixtral. Raises UserError for experts per token that do not fit."""
    num_experts = sizes.option("num_experts", 8)
    per_token = sizes.option("experts_per_token", 2)
    if not 2 <= per_token <= num_experts:
        raise UserError(f"experts_per_token ({per_token}) must be from 2 to num_experts ({num_experts})")
    router = SoftmaxRouter(sizes.dim, num_experts, per_token)
    width = sizes.option("expert_dim", default_gated_dim(sizes.dim))
    return MixtureOfExperts(router, GatedExperts(num_experts, sizes.dim, width), losses=[LoadBalanceLoss(0.01)])


def check_mixer_keywords(
    options: Mapping[str, Any], kinds: list[LayerKind], readers: Mapping[str, frozenset[str]]
) -> None:
    """Raise UserError for a keyword that no layer of a pattern reads; `readers` are those of each mixer's letter."""
    readers = {**readers, EXPERTS: EXPERT_KEYWORDS}
    present = {letter for kind in kinds for letter in kind.mixers + kind.then}
    for name, value in options.items():
        of_name = [letter for letter, keywords in readers.items() if name in keywords]
        if value and not present & set(of_name):
            raise UserError(f"{name} ({value}) is that of layers {', '.join(of_name)}, of which the pattern has none")
