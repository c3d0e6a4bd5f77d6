"""Faults that exchanging tokens at one length does not show: each is planted in a plain model of torch and found.

Every model has a sound twin, which differs in the fault alone and passes."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyformer as mf
from manyformer.analysis.contracts import Adapter, ContractRow

VOCAB = 19
DIM = 16
LENGTH = 64

Mix = Callable[["Plain", Tensor], Tensor]


class Plain(nn.Module):
    """Embeddings, one mix of positions, and logits."""

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embed = nn.Embedding(VOCAB, DIM)
            self.taps = nn.Parameter(torch.randn(LENGTH, DIM))
            self.head = nn.Linear(DIM, VOCAB)
        self.mix = mix

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(torch.tanh(x + self.mix(self, x)))


def row_of(module: nn.Module, contract: str, *, length: int | None = LENGTH, **options: Any) -> ContractRow:
    adapter = Adapter(logits=module, vocab=VOCAB, module=module, **options)
    return mf.check(adapter, only=[contract], length=length)[contract]


def counts(x: Tensor) -> Tensor:
    """How many tokens there are up to each position, as a column."""
    return torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)[:, None]


def mean_so_far(model: Plain, x: Tensor) -> Tensor:
    return x.cumsum(1) / counts(x)


def mean_by_length(model: Plain, x: Tensor) -> Tensor:
    """Sums so far over the number of tokens of the call: causal, but other numbers the more tokens follow."""
    return x.cumsum(1) / x.shape[1]


def convolved(model: Plain, x: Tensor, *, room: bool) -> Tensor:
    """A long convolution by Fourier transforms; without room for all taps, the end wraps around to the beginning."""
    size = x.shape[1] + (LENGTH if room else x.shape[1])
    spectrum = torch.fft.rfft(x, n=size, dim=1) * torch.fft.rfft(model.taps, n=size, dim=0)
    return torch.fft.irfft(spectrum, n=size, dim=1)[:, : x.shape[1]]


def attended(model: Plain, x: Tensor, *, mask: Callable[[Tensor], Tensor], low: Callable[[Tensor], float]) -> Tensor:
    """Attention with the mask of these positions; `low` is added to scores that the mask excludes."""
    scores = x @ x.mT / DIM
    visible = mask(torch.arange(x.shape[1], device=x.device))
    return torch.where(visible, scores, scores + low(scores)).softmax(-1) @ x


def causal_mask(positions: Tensor) -> Tensor:
    return positions[:, None] >= positions


def repeating_mask(positions: Tensor) -> Tensor:
    """A table of `LENGTH` positions, which begins again beyond them."""
    return causal_mask(positions % LENGTH)


def infinite(scores: Tensor) -> float:
    return -torch.inf


def small_in_bfloat16(scores: Tensor) -> float:
    return -2.0 if scores.dtype == torch.bfloat16 else -torch.inf


ATTENDED = partial(attended, mask=causal_mask, low=infinite)


def random_pattern(model: Plain, x: Tensor) -> Tensor:
    """Adds an earlier token, which is drawn anew in each call."""
    positions = torch.arange(x.shape[1])
    return x[:, (torch.rand(len(positions)) * (positions + 1)).long()]


def fixed_pattern(model: Plain, x: Tensor) -> Tensor:
    positions = torch.arange(x.shape[1])
    generator = torch.Generator().manual_seed(0)
    return x[:, (torch.rand(len(positions), generator=generator) * (positions + 1)).long()]


def chosen(model: Plain, x: Tensor, *, when: Callable[[Plain], bool]) -> Tensor:
    """Mixture of depths: half of the tokens, those with the largest scores of the whole sequence, are processed."""
    scores = x[..., 0]
    if when(model):
        threshold = scores.topk(x.shape[1] // 2, dim=1).values[:, -1:]
    else:
        threshold = torch.zeros_like(scores[:, :1])
    return torch.where((scores >= threshold)[..., None], x.sin(), 0.0)


def routed(model: Plain, x: Tensor, *, by_row: bool) -> Tensor:
    """Two experts with room for nine of ten tokens, of each row so far or of the batch, which the first ones get."""
    y = torch.zeros_like(x)
    for sign in (-1, 1):
        wanting = sign * x[..., 0] > 0
        if by_row:
            accepted = wanting.cumsum(1) <= 0.9 * counts(x)[:, 0] + 1
        else:
            accepted = wanting.flatten().cumsum(0).view_as(wanting) <= 0.9 * wanting.numel()
        y = torch.where((wanting & accepted)[..., None], sign * x.sin(), y)
    return y


def preferred(model: Plain, x: Tensor, *, by_score: bool) -> Tensor:
    """The same experts, but the best tokens of the row get the room, of which there is enough in rows of chance."""
    if not by_score:
        return routed(model, x, by_row=True)
    y = torch.zeros_like(x)
    for sign in (-1, 1):
        scores = sign * x[..., 0]
        rank = (-scores).argsort(dim=1, stable=True).argsort(dim=1)
        y = torch.where(((scores > 0) & (rank < 0.9 * x.shape[1]))[..., None], sign * x.sin(), y)
    return y


def tiny_mean(model: Plain, x: Tensor, *, size: float) -> Tensor:
    return x.cumsum(1) / counts(x) + size * x.mean(1, keepdim=True)


def sorted_first(model: Plain, x: Tensor, *, low: Callable[[Tensor], float]) -> Tensor:
    """The same attention in a model that also sorts, whose rounding might be amplified."""
    return ATTENDED(model, x, low=low) + 0.0 * x.sort(1).values


def always(model: Plain) -> bool:
    return True


def never(model: Plain) -> bool:
    return False


def in_training(model: Plain) -> bool:
    return model.training


MIXES: list[tuple[str, str, Mix, Mix]] = [
    ("length", "depend on whether 63 more follow", mean_by_length, mean_so_far),
    ("causal", "the future leaks: .* in 3 tokens", partial(convolved, room=False), partial(convolved, room=True)),
    ("length", "depend on whether", partial(convolved, room=False), partial(convolved, room=True)),
    ("causal-autocast", "leaks", partial(attended, mask=causal_mask, low=small_in_bfloat16), ATTENDED),
    ("causal-autocast", "leaks", partial(sorted_first, low=small_in_bfloat16), partial(sorted_first, low=infinite)),
    ("seed", "another seed changes the logits", random_pattern, fixed_pattern),
    ("causal", "the future leaks", partial(chosen, when=always), partial(chosen, when=never)),
    ("causal-training", "the future leaks", partial(chosen, when=in_training), partial(chosen, when=never)),
    ("length", "depend on whether", partial(chosen, when=always), partial(chosen, when=never)),
    ("causal", "the future leaks", partial(preferred, by_score=True), partial(preferred, by_score=False)),
    ("batch", "the others full of one of its tokens", partial(routed, by_row=False), partial(routed, by_row=True)),
    (
        "batch-training",
        "the others full of one of its tokens",
        partial(routed, by_row=False),
        partial(routed, by_row=True),
    ),
    ("causal", "the future leaks", partial(tiny_mean, size=1e-6), partial(tiny_mean, size=0.0)),
    ("causal-training", "the future leaks", partial(tiny_mean, size=1e-6), partial(tiny_mean, size=0.0)),
]


@pytest.mark.parametrize(("contract", "sentence", "faulty", "sound"), MIXES)
def test_a_fault_is_found_and_named_and_its_sound_twin_passes(
    contract: str, sentence: str, faulty: Mix, sound: Mix
) -> None:
    row = row_of(Plain(faulty), contract, max_length=LENGTH)
    assert row.verdict == "failed", row.sentence
    assert re.search(sentence, row.sentence), row.sentence
    row = row_of(Plain(sound), contract, max_length=LENGTH)
    assert row.verdict == "passed", row.sentence


def test_the_rounding_of_a_fourier_transform_is_no_gradient_from_the_future() -> None:
    for room, verdict in ((True, "passed"), (False, "failed")):
        row = row_of(Plain(partial(convolved, room=room)), "causal-gradient", length=20)
        assert row.verdict == verdict, row.sentence


@pytest.mark.parametrize("inner", [torch.float32, torch.float64])
def test_rounding_is_no_leak_where_a_model_casts_to_float32(inner: torch.dtype) -> None:
    """Fourier transforms round by all tokens; float64 cannot tell where the model casts its logits or its inputs."""

    def mix(model: Plain, x: Tensor, size: float) -> Tensor:
        cast = x.to(inner) if x.dtype == torch.float64 else x
        return (convolved(model, cast, room=True) + size * cast.mean(1, keepdim=True)).to(x.dtype)

    class Casting(Plain):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens).float()

    row = row_of(Casting(partial(mix, size=0.0)), "causal")
    assert row.verdict == "passed", row.sentence
    assert "but for rounding" in row.sentence
    row = row_of(Casting(partial(mix, size=1e-5 if inner == torch.float64 else 1e-4)), "causal")
    assert row.verdict == "failed", row.sentence


def test_a_leak_beyond_the_limit_of_a_model_is_told() -> None:
    faulty = Plain(partial(attended, mask=repeating_mask, low=infinite))
    row = row_of(faulty, "causal", max_length=LENGTH)
    assert row.verdict == "passed"
    assert "73 tokens, beyond its limit, do not raise, and there the future leaks" in row.sentence
    assert row_of(faulty, "causal", length=80).verdict == "failed"
    assert "beyond" not in row_of(Plain(ATTENDED), "causal", max_length=LENGTH).sentence


class Chunked(Plain):
    """Takes multiples of 8 tokens alone."""

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.shape[1] % 8:
            raise ValueError("no whole number of chunks")
        return super().forward(tokens)


def test_lengths_that_a_model_refuses_are_told_and_no_failures() -> None:
    model = Chunked(mean_so_far)
    for contract, sentence in (("causal", "(3, 13, 33 and"), ("length", "1, 2, 3, 5")):
        row = row_of(model, contract)
        assert row.verdict == "passed", row.sentence
        assert sentence in row.sentence
        assert "tokens raise" in row.sentence
    assert "raise" not in row_of(model, "length", length_multiple=8).sentence
    row = row_of(Chunked(mean_by_length), "length")
    assert row.verdict == "failed"


class Resizing(Plain):
    """Keeps the last tokens in a buffer, which is as long as the last call."""

    def __init__(self) -> None:
        super().__init__(mean_so_far)
        self.register_buffer("last", torch.zeros(1))

    def forward(self, tokens: Tensor) -> Tensor:
        self.last = tokens[:1].float()
        return super().forward(tokens)


class Listed(Plain):
    """Its layers are in a plain list, which torch does not look into."""

    def __init__(self, container: Callable[[list[nn.Module]], Any]) -> None:
        super().__init__(mean_so_far)
        self.layers = container([nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x).sin()
        return self.head(x)


class Tied(Plain):
    """Its logits come from the table of tokens; loading a state gives them a table of their own."""

    def __init__(self, *, assign: bool) -> None:
        super().__init__(mean_so_far)
        self.head.weight = self.embed.weight
        self.assign = assign

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        result = super().load_state_dict(state_dict, strict, self.assign)
        if self.assign:
            self.head.weight = nn.Parameter(state_dict["head.weight"].clone())
        return result


class Halved(Plain):
    """Its state has the weights in half precision."""

    def state_dict(self, *arguments: Any, **keywords: Any) -> Any:
        return {name: value.bfloat16() for name, value in super().state_dict(*arguments, **keywords).items()}


@pytest.mark.parametrize(
    ("faulty", "sentence"),
    [
        (Resizing(), "cannot load its own state: .* size mismatch for last"),
        (Listed(list), r"layers\[0\].weight, .* is trained, but neither a parameter nor in the state"),
        (Tied(assign=True), "loading a state unties embed.weight and head.weight"),
        (Halved(mean_so_far), "differs by .* after it has loaded its own state"),
    ],
)
def test_a_model_that_cannot_load_its_own_state_is_found(faulty: nn.Module, sentence: str) -> None:
    weights = [weight.clone() for weight in faulty.parameters()]
    row = row_of(faulty, "own-state")
    assert row.verdict == "failed", row.sentence
    assert re.search(sentence, row.sentence), row.sentence
    assert all(torch.equal(*pair) for pair in zip(weights, faulty.parameters(), strict=True))


@pytest.mark.parametrize("sound", [Plain(mean_so_far), Listed(nn.ModuleList), Tied(assign=False)])
def test_models_that_load_their_own_state_pass(sound: nn.Module) -> None:
    assert row_of(sound, "own-state").verdict == "passed"


class Tabled(nn.Module):
    """Multiplies by a table that its state leaves out: of random numbers, or of numbers that follow from its width."""

    def __init__(self, width: int, random: bool) -> None:
        super().__init__()
        self.width = width
        self.random = random
        self.embed = nn.Embedding(VOCAB, width)
        self.head = nn.Linear(width, VOCAB)
        table = torch.randn(width) if random else torch.arange(width) / width
        self.register_buffer("table", table, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens).cumsum(1) * self.table)


def test_random_numbers_that_are_in_no_state_are_found_by_building_the_model_again() -> None:
    row = mf.check(Tabled(8, random=True), only=["own-state"])["own-state"]
    assert row.verdict == "failed"
    assert "something random is in no state" in row.sentence
    row = mf.check(Tabled(8, random=False), only=["own-state"])["own-state"]
    assert row.verdict == "passed"
    assert "new ones alike" in row.sentence
    # settings that a model does not keep are not guessed
    model = Tabled(8, random=True)
    del model.random
    assert "new ones" not in mf.check(model, only=["own-state"])["own-state"].sentence


class WithTargets(Plain):
    """Called with targets, which some forms need for their logits."""

    def __init__(self, seen: Callable[[Plain, Tensor], Tensor], *, loss_alone: bool) -> None:
        super().__init__(mean_so_far)
        self.seen = seen
        self.loss_alone = loss_alone

    def forward(self, tokens: Tensor, targets: Tensor) -> Any:
        x = self.embed(tokens)
        logits = self.head(torch.tanh(x + mean_so_far(self, x) + self.seen(self, self.embed(targets))))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss if self.loss_alone else (logits, loss)


class WithOptionalTargets(WithTargets):
    """Gives logits without targets too, which have nothing to see then."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        if targets is None:
            return Plain.forward(self, tokens)
        return super().forward(tokens, targets)


def same_target(model: Plain, x: Tensor) -> Tensor:
    return 0.1 * x


def earlier_target(model: Plain, x: Tensor) -> Tensor:
    return 0.1 * nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


def target_in_training(model: Plain, x: Tensor) -> Tensor:
    return 0.1 * x if model.training else torch.zeros_like(x)


def no_target(model: Plain, x: Tensor) -> Tensor:
    return torch.zeros_like(x)


@pytest.mark.parametrize("form", [WithTargets, WithOptionalTargets])
@pytest.mark.parametrize("loss_alone", [False, True])
def test_targets_in_the_logits_are_found_in_every_form_of_call(form: type[WithTargets], loss_alone: bool) -> None:
    def check(seen: Callable[[Plain, Tensor], Tensor]) -> ContractRow:
        return mf.check(form(seen, loss_alone=loss_alone), only=["targets"])["targets"]

    for faulty, sentence in (
        (same_target, r"^the target leaks: exchanging target (\d+) changes output \1 by"),
        (target_in_training, "^in training mode, the target leaks"),
    ):
        row = check(faulty)
        assert row.verdict == "failed", row.sentence
        assert re.search(sentence, row.sentence), row.sentence
    assert "same logits, in training mode too" in check(no_target).sentence
    assert "targets of earlier positions alone" in check(earlier_target).sentence


class Cached(Plain):
    """Keeps the embeddings of earlier tokens; `both_sides` lets the tokens of one call see each other all."""

    def __init__(self, *, both_sides: bool) -> None:
        super().__init__(ATTENDED)
        self.both_sides = both_sides

    def step(self, tokens: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens)
        before = x[:, :0] if state is None else state
        keys = torch.cat([before, x], dim=1)
        positions = torch.arange(keys.shape[1])
        visible = positions[before.shape[1] :, None] >= positions
        if self.both_sides and before.shape[1]:
            visible = visible | (positions >= before.shape[1])
        scores = (x @ keys.mT / DIM).masked_fill(~visible, -torch.inf)
        return self.head(torch.tanh(x + scores.softmax(-1) @ keys)), keys


def test_chunks_after_a_cache_that_see_both_sides_are_found() -> None:
    for both_sides, verdict in ((True, "failed"), (False, "passed")):
        model = Cached(both_sides=both_sides)
        assert row_of(model, "cached", step=model.step).verdict == "passed"
        row = row_of(model, "prefill", step=model.step)
        assert row.verdict == verdict, row.sentence


class Documents(Plain):
    """Attends within documents; with `leaking` the last token of each also sees the first of the next."""

    def __init__(self, *, leaking: bool) -> None:
        super().__init__(ATTENDED)
        self.leaking = leaking

    def packed(self, tokens: Tensor, segments: Tensor) -> Tensor:
        x = self.embed(tokens)
        positions = torch.arange(tokens.shape[1])
        visible = causal_mask(positions) & (segments[:, :, None] == segments[:, None])
        if self.leaking:
            visible = visible | ((positions[:, None] + 1 == positions) & (segments[:, :, None] != segments[:, None]))
        scores = (x @ x.mT / DIM).masked_fill(~visible, -torch.inf)
        return self.head(torch.tanh(x + scores.softmax(-1) @ x))


def test_a_token_seen_across_the_border_of_packed_documents_is_found() -> None:
    for leaking, verdict in ((True, "failed"), (False, "passed")):
        model = Documents(leaking=leaking)
        assert row_of(model, "causal", packing=model.packed).verdict == "passed"
        row = row_of(model, "packing", packing=model.packed)
        assert row.verdict == verdict, row.sentence


class Noisy(Plain):
    """Draws dropout in training mode; with `leaking` what is left of all tokens goes into each."""

    def __init__(self, *, leaking: bool) -> None:
        super().__init__(mean_so_far)
        self.leaking = leaking

    def forward(self, tokens: Tensor) -> Tensor:
        x = nn.functional.dropout(self.embed(tokens), 0.3, self.training)
        y = mean_so_far(self, x)
        if self.leaking and self.training:
            y = y + 1e-4 * x.mean(1, keepdim=True)
        return self.head(torch.tanh(x + y))


def test_a_leak_in_training_mode_is_found_under_dropout() -> None:
    for leaking, verdict in ((True, "failed"), (False, "passed")):
        row = row_of(Noisy(leaking=leaking), "causal-training")
        assert row.verdict == verdict, row.sentence
    assert row_of(Noisy(leaking=True), "causal").verdict == "passed"
