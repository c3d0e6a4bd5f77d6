"""Drafts change how fast a text is decoded, and nothing of what is in it."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import manyformer as mf
from manyformer.analysis.own_models import build_tiny
from manyformer.base.errors import UserError
from manyformer.inference.generate.draft_acceptance import SampledAcceptance
from manyformer.inference.generate.drafters import DraftedToken, LookupDrafter, VerifiedText
from manyformer.inference.generate.rewindable_feed import RewindableFeed
from manyformer.nn.attention.kv_cache.kv_source import KVCache
from manyformer.nn.batches import CausalLMBatch
from manyformer.nn.core import tree_map

VOCAB = 9
SMALL: dict[str, Any] = {"vocab": VOCAB, "dim": 16, "depth": 2, "heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "chain": ("compose", {"ahead": "sequential", "ahead_tokens": 3, "max_length": 256, "position": "learned"}),
    "parallel": ("llama", {"ahead": "parallel", "ahead_tokens": 3, "window": 5}),
    "hybrid": ("compose", {"ahead": "sequential", "ahead_tokens": 2, "pattern": "DF", "position": "rope"}),
    "recurrent": ("compose", {"ahead": "parallel", "ahead_tokens": 2, "kernel": "linear", "position": "none"}),
}
PROMPTS = [[1], [2, 3], [4, 0, 1], [7, 7, 7, 2, 5], [0, 1, 2, 3, 4, 5, 6, 7]]


def text_rows(rows: int, length: int, generator: torch.Generator) -> Tensor:
    """Texts in which a token follows from the two before it, nine times in ten."""
    table = torch.randint(0, VOCAB, (VOCAB, VOCAB), generator=torch.Generator().manual_seed(5))
    tokens = torch.randint(0, VOCAB, (rows, length), generator=generator)
    for column in range(2, length):
        follows = torch.rand(rows, generator=generator) < 0.9
        following = table[tokens[:, column - 2], tokens[:, column - 1]]
        tokens[:, column] = torch.where(follows, following, tokens[:, column])
    return tokens


def trained(name: str) -> Any:
    """A model that has learned enough for some drafts to stand, and for some not to."""
    recipe, keywords = MODELS[name]
    torch.manual_seed(1)
    model: Any = mf.build(recipe, **SMALL, **keywords).double()
    generator = torch.Generator().manual_seed(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        tokens = text_rows(8, 20, generator)
        loss = model.loss(CausalLMBatch(tokens[:, :-1], tokens[:, 1:]))
        optimizer.zero_grad()
        (loss.total / loss.targets + loss.extra).backward()
        optimizer.step()
    return model.eval()


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> Any:
    return trained(request.param)


each_model = pytest.mark.parametrize("model", MODELS, indirect=True)


@each_model
@pytest.mark.parametrize("options", [{"draft": 1}, {"draft": 2}, {"draft": 4, "drafter": "lookup"}])
def test_greedy_texts_are_those_without_drafts(model: Any, options: dict[str, Any]) -> None:
    plain = mf.generate(model, PROMPTS, max_new=30)
    drafted = mf.generate(model, PROMPTS, max_new=30, **options)
    assert drafted.tokens == plain.tokens
    counts = drafted.stats.drafts
    # some stand and some do not, so that states went back
    assert counts.accepted
    assert counts.accepted < counts.drafted or options == {"draft": 1}
    # after the first token of each text, which the prompt gives
    assert counts.calls + counts.accepted >= drafted.stats.new_tokens - len(PROMPTS)
    assert counts.calls < drafted.stats.new_tokens
    assert f"{counts.tokens_per_call:.2f} tokens a step" in str(drafted.stats)
    assert plain.stats.drafts.calls == 0


@pytest.mark.parametrize("model", ["chain"], indirect=True)
def test_two_hundred_tokens_with_the_longest_chain(model: Any) -> None:
    plain = mf.generate(model, PROMPTS[2], max_new=200)
    assert mf.generate(model, PROMPTS[2], max_new=200, draft=3).tokens == plain.tokens


@pytest.mark.parametrize("model", ["chain", "hybrid"], indirect=True)
@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram": 2},
        {"stop_ids": (3, 6)},
        {"max_new": 1},
        {"max_new": 2},
    ],
)
def test_options_hold_for_drafted_tokens(model: Any, options: dict[str, Any]) -> None:
    options = {"max_new": 20, **options}
    plain = mf.generate(model, PROMPTS, **options)
    drafted = mf.generate(model, PROMPTS, draft=2, **options)
    assert [row[0] for row in drafted.rows] == [row[0] for row in plain.rows]


@pytest.mark.parametrize("model", ["chain"], indirect=True)
def test_pieces_come_token_by_token(model: Any) -> None:
    pieces: list[Any] = []
    result = mf.generate(model, PROMPTS, max_new=12, draft=3, on_piece=pieces.append)
    for row, tokens in enumerate(result.tokens):
        own = [piece for piece in pieces if piece.row == row]
        assert [piece.token for piece in own] == tokens
        assert [piece.finish for piece in own] == [None] * 11 + ["limit"]


@pytest.mark.parametrize("model", ["chain", "hybrid"], indirect=True)
@pytest.mark.parametrize("options", [{"draft": 2}, {"draft": 3, "drafter": "lookup"}])
def test_a_seed_repeats_a_sampled_text(model: Any, options: dict[str, Any]) -> None:
    first, again, other = (
        mf.generate(model, PROMPTS, max_new=15, temperature=0.9, top_k=6, seed=seed, **options).tokens
        for seed in (1, 1, 2)
    )
    assert first == again != other


def chi_square(counts: Counter[Any], expected: dict[Any, float]) -> float:
    """The statistic of counts against expected numbers, all of them above 0."""
    assert counts.keys() <= expected.keys()
    return sum((counts[key] - number) ** 2 / number for key, number in expected.items())


LIMIT = 51.2
"""The statistic that 1 in 1,000 samples exceeds, with 24 degrees of freedom."""


def drawn_pairs(
    draws: int, p: list[Tensor], propose: Callable[[SampledAcceptance, int | None], DraftedToken]
) -> Counter[Any]:
    """The first two tokens of many texts, of two drafts each, where `p` are the model's distributions of both."""
    rule = SampledAcceptance(4)
    pairs: Counter[Any] = Counter()
    for _ in range(draws):
        first = propose(rule, None)
        second = propose(rule, first.token)
        logits = torch.stack([p[0], p[1][first.token], p[1][second.token]]).log()
        tokens = rule.verify(logits, [first, second])
        if len(tokens) == 1:
            # the text goes on from the token in place of the first draft
            tokens += rule.verify(p[1][tokens[0]].log()[None], [])
        pairs[tokens[0], tokens[1]] += 1
    return pairs


def distributions(seed: int) -> list[Tensor]:
    """The distribution of a first token of 5, and of a second one after each first."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).softmax(-1) for shape in ((5,), (5, 5))]


@pytest.mark.parametrize(("kind", "draws"), [("sampled", 20_000), ("certain", 4_000)])
def test_sampled_tokens_have_the_distribution_of_the_model(kind: str, draws: int) -> None:
    p, q = distributions(0), distributions(1)

    def propose(rule: SampledAcceptance, before: int | None) -> DraftedToken:
        if kind == "certain":
            return DraftedToken(2 if before is None else (before + 1) % 5)
        return rule.draft((q[0] if before is None else q[1][before]).log()[None])

    expected = {(a, b): draws * float(p[0][a] * p[1][a, b]) for a in range(5) for b in range(5)}
    assert chi_square(drawn_pairs(draws, p, propose), expected) < LIMIT
    # what would come of accepting every draft
    if kind == "sampled":
        rule = SampledAcceptance(4)
        drafted = Counter((token := propose(rule, None).token, propose(rule, token).token) for _ in range(2_000))
        assert chi_square(drafted, {key: number / 10 for key, number in expected.items()}) > 4 * LIMIT


@pytest.mark.slow
def test_sampled_texts_have_the_distribution_of_the_model() -> None:
    """All of it together: drafts of a chain, a temperature, and states that go back."""
    torch.manual_seed(3)
    model: Any = mf.build("compose", vocab=5, dim=8, depth=1, heads=1, ahead="sequential", ahead_tokens=2).eval()
    prompt = [1, 3]
    draws = 1500
    counts = Counter(
        tuple(mf.generate(model, prompt, max_new=3, temperature=0.7, draft=2, seed=seed, stop_ids=()).tokens[0][1:])
        for seed in range(draws)
    )
    expected: dict[Any, float] = Counter()
    with torch.no_grad():
        for a in range(5):
            logits = model(torch.tensor([prompt, [*prompt, a][-2:]])).logits
            first = (logits[0, -1] / 0.7).softmax(-1)[a]
            second = (model(torch.tensor([[*prompt, a]])).logits[0, -1] / 0.7).softmax(-1)
            for b in range(5):
                third = (model(torch.tensor([[*prompt, a, b]])).logits[0, -1] / 0.7).softmax(-1)
                for c in range(5):
                    expected[b, c] += draws * float(first * second[b] * third[c])
    assert chi_square(counts, expected) < LIMIT


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 1, 2, 3], [4, 1]),
        ([5, 1, 2, 7, 3, 2, 8, 1, 2], [7, 3]),
        ([6, 6], [6]),
        ([1, 2, 3], []),
        ([4], []),
    ],
)
def test_a_lookup_drafts_what_followed_the_longest_end(tokens: list[int], expected: list[int]) -> None:
    text = VerifiedText(torch.tensor([tokens]), torch.zeros(1, 1, 2))
    drafts = LookupDrafter().draft(text, 2, lambda logits, drafted: DraftedToken(0))
    assert drafts == [DraftedToken(token) for token in expected]


@pytest.mark.parametrize("recipe", ["gated-deltanet", "mamba", "rwkv-7", "transformer-xl", "gpt-oss", "qwen3-next"])
def test_states_of_every_kind_go_back(recipe: str) -> None:
    """Rings, convolutions, sums and memories, by what a lookup drafts."""
    model: Any = build_tiny(recipe, {}, 0).double().eval()
    prompt = [[3, 4, 5, 3, 4, 5, 3, 4]]
    plain = mf.generate(model, prompt, max_new=24, stop_ids=())
    drafted = mf.generate(model, prompt, max_new=24, stop_ids=(), draft=3, drafter="lookup")
    assert drafted.tokens == plain.tokens
    assert drafted.stats.drafts.drafted


def test_caches_are_cut_and_sums_are_read_again() -> None:
    attending: Any = mf.build("compose", **SMALL, position="rope").double().eval()
    summing: Any = mf.build("compose", **SMALL, kernel="linear", position="rope").double().eval()
    tokens = torch.randint(0, VOCAB, (1, 12))
    for model, lengths in ((attending, [8]), (summing, [5])):
        feed = RewindableFeed(model, 32)
        with torch.inference_mode():
            feed(tokens, 5)
            feed.read(tokens[:, 5:10], 5)
            feed.keep(3)
            assert [feed.length] == lengths
            rest = feed.read(tokens[:, feed.length :], 4).logits
            expected = model(tokens).logits[0, 8:].float()
        torch.testing.assert_close(rest, expected, rtol=1e-6, atol=1e-6)
    shapes: list[Any] = []
    state = attending.init_state(1)
    tree_map(lambda tensor: shapes.append(tensor.shape) or tensor, state)
    assert isinstance(state.body[0][0].source, KVCache)


@pytest.mark.parametrize("model", ["hybrid"], indirect=True)
def test_few_tokens_are_read_again(model: Any) -> None:
    """A state that cannot go back is brought up to date before it lags far behind."""
    lengths: list[int] = []
    read = RewindableFeed.read

    def counted(self: RewindableFeed, tokens: Tensor, last: int) -> Any:
        lengths.append(tokens.shape[1])
        return read(self, tokens, last)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RewindableFeed, "read", counted)
        mf.generate(model, [[1, 2, 3]], max_new=80, draft=2)
    assert max(lengths) <= 16 + 1 + 2
    assert max(lengths) > 3


@pytest.mark.parametrize("model", ["chain"], indirect=True)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": 4}, r"draft \(4\) is more than the 3 tokens after the next one that this model predicts"),
        ({"draft": 0}, "draft must be 1 or more tokens, got 0"),
        ({"drafter": "lookup"}, "drafter is lookup, but nothing is drafted"),
        ({"draft": 1, "drafter": "oracle"}, "drafter must be one of ahead, lookup, got 'oracle'"),
        ({"draft": 1, "beam": 2}, "beam search chooses among many texts"),
        ({"draft": 1, "samples": 2}, r"draft decodes one text of each prompt: leave it out, or samples \(2\)"),
        ({"draft": 1, "use_cache": False}, "use_cache is False, but drafts are verified with a cache"),
        ({"draft": 1, "step_path": "static"}, "step_path is static, but drafts are verified with a cache"),
    ],
)
def test_what_excludes_drafts_is_said(model: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        mf.generate(model, [1, 2], **options)


def test_models_that_cannot_draft_say_so() -> None:
    plain: Any = mf.build("compose", **SMALL)
    with pytest.raises(UserError, match="draft needs a model with layers that predict further tokens"):
        mf.generate(plain, [1, 2], draft=1)
    shared: Any = mf.build("compose", **SMALL, ahead="shared")
    with pytest.raises(UserError, match="draft needs a model with layers that predict further tokens"):
        mf.generate(shared, [1, 2], draft=1)
    translating: Any = mf.build("transformer", **SMALL)
    with pytest.raises(UserError, match="draft is for language models, and a EncoderDecoder is none"):
        mf.generate(translating, [3, 4], draft=1)
    plain.register_forward_hook(lambda module, inputs, output: None)
    with pytest.raises(UserError, match="hooks of the whole model are not called"):
        mf.generate(plain, [1, 2], draft=1, drafter="lookup")


def test_nothing_to_choose_is_told_with_its_place() -> None:
    model: Any = mf.build("compose", **SMALL).eval()
    with torch.no_grad():
        model.head.weight.fill_(math.nan)
    with pytest.raises(UserError, match="nothing to choose from for prompt 0 after 0 new tokens"):
        mf.generate(model, [1, 2], draft=1, drafter="lookup")
