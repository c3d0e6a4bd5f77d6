"""Layers with one mistake each, to be put into a sound model."""

from typing import Any

import torch
from torch import Tensor, nn

import manyformer as mf
from manyformer.models import LanguageModel, Model
from manyformer.nn.core import PADDING_SEGMENT, Chain, Context, Layer, LayerOutput, State
from perturbing import perturb

SMALL = {"vocab": 23, "dim": 16, "depth": 1, "heads": 2, "max_length": 64}


def language_model(mistake: Layer | None = None) -> LanguageModel:
    """A small sound language model with `mistake` after its last layer."""
    torch.manual_seed(3)
    model = mf.build("transformer-lm", **SMALL)
    assert isinstance(model, LanguageModel)
    return with_mistake(model, mistake)


def with_mistake(model: Any, mistake: Layer | None, *, where: str = "body") -> Any:
    """`model` with one more layer at the end of its stack."""
    perturb(model, 0.1)
    if mistake is not None:
        setattr(model, where, Chain(sound=getattr(model, where), mistake=mistake))
    return model


class Simple(Layer):
    """A mistake that needs no state."""

    def change(self, x: Tensor, ctx: Context) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, ctx: Context, state: State = None) -> LayerOutput:
        return LayerOutput(self.change(x, ctx), state)


class Leak(Simple):
    """Every token gets a trace of the mean of all, so small that no loss curve would show it."""

    def change(self, x: Tensor, ctx: Context) -> Tensor:
        return x + 1e-5 * x.mean(1, keepdim=True)


class HiddenLeak(Simple):
    """The future picks the sign of a step, which has no gradient."""

    def change(self, x: Tensor, ctx: Context) -> Tensor:
        return x + 0.1 * (100 * x).sum((1, 2), keepdim=True).sin().sign().detach()


class LateLeak(Simple):
    """Clean within the first 64 tokens, as a block pattern is within its first blocks."""

    sound_length = 64

    def change(self, x: Tensor, ctx: Context) -> Tensor:
        return x if x.shape[1] <= self.sound_length else x + x[:, -1:]


class VeryLateLeak(LateLeak):
    """Clean within the first 512 tokens."""

    sound_length = 512


class Rescaled(Simple):
    """The future decides by what each number is multiplied and divided again, which moves its last bits."""

    def change(self, x: Tensor, ctx: Context) -> Tensor:
        factor = self.positive(x) + 3
        return x * factor / factor

    def positive(self, x: Tensor) -> Tensor:
        return (x[..., 0] > 0).sum()


class RescaledByWidth(Rescaled):
    """Sound: the same as the rounding of a computation on some tokens, whose number is that of the rows gathered."""

    def positive(self, x: Tensor) -> Tensor:
        gathered = x.flatten(0, 1)[(x[..., 0] > 0).flatten()]
        return torch.ones_like(gathered[:, 0]).sum()


class RescaledByContent(Rescaled):
    """Sound: says itself that what it computes follows from the content of tokens."""

    content_based = True


class GatheredLeak(Simple):
    """A small trace of the mean of some tokens, later ones among them, whose number follows from their content."""

    def change(self, x: Tensor, ctx: Context) -> Tensor:
        return x + 1e-6 * x[:, (x[..., 0] > 0).any(0)].mean(1, keepdim=True)


class Constant(Simple):
    """Nothing goes through."""

    def change(self, x: Tensor, ctx: Context) -> Tensor:
        return torch.ones_like(x)


class Shift(Layer):
    """Half of each token comes from the one before (token shift): right with or without a state."""

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        return torch.zeros(batch, 1, 16, device=device, dtype=dtype)

    def forward(self, x: Tensor, ctx: Context, state: State = None) -> LayerOutput:
        before = torch.zeros_like(x[:, :1]) if state is None else state
        shifted = torch.cat([before, x[:, :-1]], dim=1)
        return LayerOutput(x + shifted, None if state is None else self.keep(x, state))

    def keep(self, x: Tensor, state: Tensor) -> State:
        return x[:, -1:]


class ForgetfulShift(Shift):
    """The state is never brought up to date."""

    def keep(self, x: Tensor, state: Tensor) -> State:
        return state


class StepwiseShift(Shift):
    """Right one token at a time, wrong in chunks: the first token of a chunk is kept."""

    def keep(self, x: Tensor, state: Tensor) -> State:
        return x[:, :1]


class InPlaceShift(Shift):
    """The state is overwritten, so that nobody can go on from it again."""

    def keep(self, x: Tensor, state: Tensor) -> State:
        return state.copy_(x[:, -1:])


class RoomyShift(Shift):
    """With reserved room it starts from elsewhere."""

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        return super().init_state(batch, device=device, dtype=dtype) + (0 if capacity is None else 1)


class StuckShift(Shift):
    """The state hides in an object that no tree map opens, so rows are never reordered; too few are filled up."""

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        return Box(super().init_state(batch, device=device, dtype=dtype))

    def forward(self, x: Tensor, ctx: Context, state: State = None) -> LayerOutput:
        if state is None:
            return super().forward(x, ctx)
        rows = torch.arange(x.shape[0]) % state.value.shape[0]
        y, kept, _ = super().forward(x, ctx, state.value[rows])
        return LayerOutput(y, Box(kept))


class Box:
    """Something that holds a tensor and is no tuple, list or dict."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Average(Simple):
    """Causal, but the mean of all tokens so far takes in padding and other documents."""

    def change(self, x: Tensor, ctx: Context) -> Tensor:
        return x + x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]


class Pool(Simple):
    """For encoders: the mean of the whole row, padding and all."""

    def change(self, x: Tensor, ctx: Context) -> Tensor:
        return x + x.mean(1, keepdim=True)


class Columns(Simple):
    """Counts columns of the call instead of positions in the document."""

    def change(self, x: Tensor, ctx: Context) -> Tensor:
        return x + 0.01 * torch.arange(x.shape[1], device=x.device)[:, None]


class Positions(Simple):
    """Counts positions in the document: right everywhere."""

    def change(self, x: Tensor, ctx: Context) -> Tensor:
        return x + 0.01 * ctx.positions.position_ids[..., None]


class Whitened(Simple):
    """Subtracts the mean over the batch."""

    def change(self, x: Tensor, ctx: Context) -> Tensor:
        return x - 0.1 * x.mean(0, keepdim=True)


class Unused(Simple):
    """A matrix that nothing reads, and one that is always multiplied by zero."""

    def __init__(self) -> None:
        super().__init__()
        self.idle, self.silenced = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)

    def change(self, x: Tensor, ctx: Context) -> Tensor:
        return x + 0.0 * self.silenced(x)


class EmptyNaN(Simple):
    """Divides by the number of real tokens, which may be none."""

    def change(self, x: Tensor, ctx: Context) -> Tensor:
        real = (ctx.positions.segment_ids != PADDING_SEGMENT)[..., None].sum(1, keepdim=True)
        return x + 0.0 / real


class EmptyNaNGradient(Simple):
    """Finite forward, but the root of zero that `where` throws away still has an infinite slope."""

    def change(self, x: Tensor, ctx: Context) -> Tensor:
        real = (ctx.positions.segment_ids != PADDING_SEGMENT)[..., None]
        size = (x * real).square().sum((1, 2), keepdim=True)
        return x + torch.where(size > 0, size.sqrt(), 0.0)


class Cancelling(Simple):
    """Adds and takes away something large, which costs float32 half of its digits."""

    def change(self, x: Tensor, ctx: Context) -> Tensor:
        return (x + 1e4) - 1e4


class Overflowing(Simple):
    """Infinite minus infinite, where matrix products are coarse."""

    def change(self, x: Tensor, ctx: Context) -> Tensor:
        return x + (x.new_tensor(float("nan")) if torch.is_autocast_enabled("cpu") else 0.0)


class Traced(Simple):
    """Behaves differently under compilation."""

    def change(self, x: Tensor, ctx: Context) -> Tensor:
        return 2 * x if torch.compiler.is_compiling() else x


class Random(Simple):
    """Noise from a generator that nobody can seed."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = torch.Generator()
        self.noise.seed()

    def change(self, x: Tensor, ctx: Context) -> Tensor:
        return x + torch.rand(x.shape, generator=self.noise, dtype=x.dtype)


class Remembering(Simple):
    """Notes the shortest row that it ever met, and uses it."""

    shortest = 10**6

    def change(self, x: Tensor, ctx: Context) -> Tensor:
        self.shortest = min(self.shortest, x.shape[1])
        return x * (1 + 1 / self.shortest)


class Unsaved(Simple):
    """A random table that the state dict leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(16), persistent=False)
        self.table: Tensor

    def change(self, x: Tensor, ctx: Context) -> Tensor:
        return x + self.table


class Blind(Layer):
    """A stack that never looks at other tokens: it learns nothing that lies elsewhere."""

    def forward(self, x: Tensor, ctx: Context, state: State = None) -> LayerOutput:
        return LayerOutput(x, state)


class WrongLoss(nn.Module):
    """A head whose training loss forgets to leave out what is to be ignored."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.head = head

    def forward(self, x: Tensor) -> Any:
        return self.head(x)

    def loss(self, x: Tensor, targets: Tensor, *, smoothing: float) -> Any:
        return self.head.loss(x, targets.clamp(min=0), smoothing=smoothing)

    def score(self, x: Tensor, targets: Tensor) -> Any:
        return self.head.score(x, targets)


def named(model: Model, recipe: str, **keywords: Any) -> Model:
    """`model` with another account of how it was made."""
    model.spec = model.spec._replace(recipe=recipe, keywords=keywords)
    return model
