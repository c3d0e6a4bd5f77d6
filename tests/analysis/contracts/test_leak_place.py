"""The place of a leak: a fault planted in one submodule, at one position, is named there and nowhere else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import manyformer as mf
from manyformer.analysis.contracts import Adapter
from manyformer.analysis.contracts.leak_place import LeakPlace

WIDTH = 12
VOCABULARY = 31


class Mixer(nn.Module):
    """A running mean of projected tokens; with a leak, one output sees one later token, or every one of a period."""

    def __init__(self, output: int | None = None, token: int = 0, period: int = 0) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)
        self.output = output
        self.token = token
        self.period = period

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.mix(self.inner(x)))  # type: ignore[no-any-return]

    def mix(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        mask = torch.ones(length, length).tril()
        if self.output is not None:
            for start in range(0, length, self.period or length):
                if start + self.token < length:
                    mask[start + self.output, start + self.token] = 1
        weights = mask / mask.sum(-1, keepdim=True)
        return weights.to(x.dtype) @ x


class MixedTimeFirst(Mixer):
    """The same with the tokens on the first axis."""

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.mix(self.inner(x.transpose(0, 1)).transpose(0, 1)))  # type: ignore[no-any-return]


class MixedByHeads(Mixer):
    """The same in heads (b, h, t, d), with dropout."""

    def forward(self, x: Tensor) -> Tensor:
        heads = self.inner(x).unflatten(-1, (2, -1)).transpose(1, 2)
        mixed = torch.stack([self.mix(head) for head in heads.unbind(1)], dim=1)
        return self.outer(F.dropout(mixed.transpose(1, 2).flatten(2), 0.1, self.training))  # type: ignore[no-any-return]


class MixedFlat(Mixer):
    """The same with rows and tokens on one axis around it, and a tuple as the result."""

    def forward(self, x: Tensor) -> Any:
        rows, length, _ = x.shape
        mixed = self.mix(self.inner(x.flatten(0, 1)).unflatten(0, (rows, length)))
        return self.outer(mixed.flatten(0, 1)).view(rows, length, -1), None


class Block(nn.Module):
    def __init__(self, mixer: nn.Module, *, recomputed: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mixer = mixer
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.recomputed = recomputed

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputed and self.training:
            return checkpoint(self.change, x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.change(x)

    def change(self, x: Tensor) -> Tensor:
        mixed = self.mixer(self.norm(x))
        x = x + (mixed[0] if isinstance(mixed, tuple) else mixed)
        return x + self.mlp(x)  # type: ignore[no-any-return]


class Decoder(nn.Module):
    def __init__(self, *mixers: nn.Module, recomputed: bool = False, times: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(mixer, recomputed=recomputed) for mixer in mixers)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.times = times

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for _ in range(self.times):
            for block in self.blocks:
                x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def place_of(model: nn.Module, contract: str = "causal", **options: Any) -> LeakPlace | None:
    adapter = Adapter(logits=model, vocab=VOCABULARY, module=model, **options)
    return mf.check(adapter, only=[contract], length=48)[contract].place


@pytest.mark.parametrize("mixer", [Mixer, MixedTimeFirst, MixedByHeads, MixedFlat])
@pytest.mark.parametrize("contract", ["causal", "causal-training"])
def test_a_leak_is_named_with_its_submodule_and_its_positions(mixer: type[Mixer], contract: str) -> None:
    torch.manual_seed(0)
    place = place_of(Decoder(mixer(), mixer(6, 9), mixer()), contract)
    assert place is not None
    assert (place.module, place.module_class) == ("blocks.1.mixer", mixer.__name__)
    assert (place.output, place.token, place.length) == (6, 9, 10)
    assert (place.after, place.before) == ("inner", "outer")
    assert place.layers_told == f"in 1 of 3 {mixer.__name__}"
    assert place.training == (contract == "causal-training")
    assert place.code == "return weights.to(x.dtype) @ x"
    assert place.file == "tests/analysis/contracts/test_leak_place.py"


def test_a_leak_in_a_late_period_is_shortened_to_a_few_tokens() -> None:
    torch.manual_seed(0)
    place = place_of(Decoder(Mixer(), Mixer(2, 5, period=8)))
    assert place is not None
    assert (place.output, place.token, place.length) == (2, 5, 6)
    assert place.matrix is not None
    # the layer before has mixed the tokens, so that token 5 carries those between
    assert place.matrix.leaks == ((2, 3), (2, 4), (2, 5))


def test_a_leak_beyond_the_short_lengths_is_found() -> None:
    torch.manual_seed(0)
    model = Decoder(Mixer(), Mixer(70, 71))
    place = mf.check(Adapter(logits=model, vocab=VOCABULARY), only=["causal"], length=90)["causal"].place
    assert place is not None
    assert (place.module, place.output, place.token, place.length) == ("blocks.1.mixer", 70, 71, 72)
    assert place.matrix is not None
    assert (place.matrix.start, place.matrix.bin_size) == (40, 1)
    assert place.matrix.leaks == ((70, 71),)


def test_all_layers_that_leak_are_counted_and_the_first_is_named() -> None:
    torch.manual_seed(0)
    place = place_of(Decoder(Mixer(), Mixer(1, 3), Mixer(1, 3)))
    assert place is not None
    assert place.module == "blocks.1.mixer"
    assert place.layers == ("blocks.1.mixer", "blocks.2.mixer")
    assert place.layers_told == "in 2 of 3 Mixer"


def test_recomputation_and_repeated_calls_do_not_hide_the_submodule() -> None:
    torch.manual_seed(0)
    place = place_of(Decoder(Mixer(), Mixer(6, 9), recomputed=True), "causal-training")
    assert place is not None
    assert place.module == "blocks.1.mixer"
    place = place_of(Decoder(Mixer(), Mixer(6, 9), times=3))
    assert place is not None
    assert (place.module, place.layers_told) == ("blocks.1.mixer", "in 1 of 2 Mixer")


class MeanBetweenChildren(nn.Module):
    """The mean of the whole sequence, in the forward of the parent."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.third = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))
        x = x + x.mean(1, keepdim=True)
        return self.third(x)  # type: ignore[no-any-return]


class NormOverTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.mT).mT  # type: ignore[no-any-return]


class BlockScores(nn.Module):
    """Attention within blocks (b, t/c, c, d) without a mask."""

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, 0, -x.shape[1] % 4)).view(x.shape[0], -1, 4, WIDTH)
        scores = (padded @ padded.mT).softmax(-1)
        return (scores @ padded).flatten(1, 2)[:, : x.shape[1]]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]  # type: ignore[no-any-return]


class Assigned(nn.Module):
    """A part of a tensor is assigned in place."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y[:, 0] = x[:, -1]
        return y


@pytest.mark.parametrize(
    ("make", "module", "where", "code"),
    [
        (MeanBetweenChildren, "blocks.1.mixer", "after second, before third", "x.mean(1, keepdim=True)"),
        (NormOverTokens, "blocks.1.mixer.norm", "(InstanceNorm1d)", "self.norm(x.mT)"),
        (BlockScores, "blocks.1.mixer", "(BlockScores)", "scores"),
        (Recurrent, "blocks.1.mixer.cell", "(GRU)", "self.cell(x)"),
        (Assigned, "blocks.1.mixer", "(Assigned)", "y[:, 0] = x[:, -1]"),
    ],
)
def test_other_forms_of_leaks_are_named(make: Callable[[], nn.Module], module: str, where: str, code: str) -> None:
    torch.manual_seed(0)
    place = place_of(Decoder(Mixer(), make()))
    assert place is not None
    assert place.module == module
    assert where in place.where
    assert place.code is not None
    assert code in place.code


class SoundTransform(nn.Module):
    """A causal convolution by a transform that is long enough, and two turns that undo each other."""

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        filters = torch.fft.rfft(torch.ones(length, 1).to(x), n=2 * length, dim=0)
        mixed = torch.fft.irfft(torch.fft.rfft(x, n=2 * length, dim=1) * filters, n=2 * length, dim=1)[:, :length]
        return mixed.flip(1).flip(1) / length


def test_a_sound_model_has_no_place_and_a_sound_layer_before_the_leak_is_not_blamed() -> None:
    torch.manual_seed(0)
    assert place_of(Decoder(SoundTransform(), Mixer())) is None
    place = place_of(Decoder(SoundTransform(), Mixer(6, 9)))
    assert place is not None
    assert place.module == "blocks.1.mixer"


def test_without_a_module_the_positions_are_told() -> None:
    torch.manual_seed(0)
    model = Decoder(Mixer(6, 9)).eval()
    adapter = Adapter(logits=lambda tokens: model(tokens).detach(), vocab=VOCABULARY)
    place = mf.check(adapter, only=["causal"], length=48)["causal"].place
    assert place is not None
    assert (place.module, place.output, place.token) == (None, 6, 9)
    assert place.where == "the submodule was not found"
    assert "without `module`" in place.notes[0]


class RowMean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - 0.5 * x.mean(0, keepdim=True)


class LengthScale(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.shape[1] / 16


@pytest.mark.parametrize("contract", ["batch", "batch-training"])
def test_rows_that_see_each_other_are_named(contract: str) -> None:
    torch.manual_seed(0)
    place = place_of(Decoder(Mixer(), RowMean()), contract)
    assert place is not None
    assert (place.module, place.module_class, place.kind) == ("blocks.1.mixer", "RowMean", "other rows")
    assert place.code == "return x - 0.5 * x.mean(0, keepdim=True)"


class Shifted(nn.Module):
    """Half of each token is the one before; with a state, `wrong` keeps the one before that from step 3 on."""

    def __init__(self, *, wrong: bool) -> None:
        super().__init__()
        self.wrong = wrong
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, state: Any = None) -> Any:
        before = torch.zeros_like(x[:, :1]) if state is None else state[0]
        count = 0 if state is None else state[1]
        shifted = self.linear(torch.cat([before, x[:, :-1]], dim=1))
        kept = before if self.wrong and count >= 3 else x[:, -1:]
        return x + shifted, (kept, count + x.shape[1])


class Stepwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Shifted(wrong=index == 1) for index in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, states: Any = None) -> Any:
        x = self.embed(tokens)
        new_states = []
        for index, layer in enumerate(self.layers):
            x, state = layer(x, None if states is None else states[index])
            new_states.append(state)
        return self.head(x), new_states


def test_the_layer_whose_cache_is_wrong_is_named_with_the_step() -> None:
    torch.manual_seed(0)
    model = Stepwise()
    adapter = Adapter(logits=lambda tokens: model(tokens)[0], step=model, vocab=VOCABULARY, module=model)
    place = mf.check(adapter, only=["cached"], length=48)["cached"].place
    assert place is not None
    assert (place.kind, place.module, place.output) == ("cache", "layers.1", 4)
    assert place.layers_told == "in 1 of 3 Shifted"


def test_the_smallest_input_shows_the_leak_by_itself() -> None:
    torch.manual_seed(0)
    model = Decoder(Mixer(), Mixer(6, 9)).eval()
    # constant parameters are perturbed for the check, and its numbers are then not those of the model as it is
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    place = place_of(model)
    assert place is not None
    printed: list[Tensor] = []
    exec(place.snippet(), {"logits": model, "print": printed.append})
    assert printed[0].shape == (1, 9)
    assert float(printed[0][0, 6]) == pytest.approx(place.size, rel=1e-3)
    assert not printed[0][0, :6].any()


def test_a_place_fits_into_a_terminal() -> None:
    torch.manual_seed(0)
    adapter = Adapter(logits=Decoder(Mixer(), Mixer(6, 9)), vocab=VOCABULARY)
    report = mf.check(adapter, only=["causal", "batch"], length=48)
    place = report["causal"].place
    assert place is not None
    table = report.table().splitlines()
    start = next(index for index, line in enumerate(table) if line.startswith("causal ")) + 1
    shown = table[start : start + 3]
    assert [line.strip() for line in shown] == place.lines(78)
    assert all(len(line) <= 80 for line in shown)
    assert shown[1].strip() == "in the forward of blocks.1.mixer (Mixer), after inner, before outer"


def test_what_a_search_cannot_find_is_said_and_changes_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_error(*arguments: Any) -> None:
        raise RuntimeError("out of memory")

    torch.manual_seed(0)
    monkeypatch.setattr("manyformer.analysis.contracts.leak_input.LeakInput.find", raise_error)
    adapter = Adapter(logits=Decoder(Mixer(6, 9)), vocab=VOCABULARY)
    report = mf.check(adapter, only=["causal"], length=48)
    assert report["causal"].verdict == "failed"
    place = report["causal"].place
    assert place is not None
    assert place.lines() == ["the place was not found: RuntimeError was raised"]
    assert "the place was not found" in report.to_html()


class Constant(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        return torch.ones(*tokens.shape, VOCABULARY)


def test_a_model_that_reads_nothing_leaks_nowhere() -> None:
    row = mf.check(Adapter(logits=Constant(), vocab=VOCABULARY), only=["causal"], length=48)["causal"]
    assert row.verdict == "failed"
    assert row.place is None
