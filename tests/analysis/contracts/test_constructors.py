"""Small models are built from the names of a constructor's parameters, and what no name tells is asked for."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Optional

import pytest
import torch
from torch import Tensor, nn

from manyformer.analysis.contracts.constructors import build_from_names, fitting_sizes
from manyformer.base.errors import UserError


def build(target: Callable[..., Any], **given: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What a model was built with, and what was said about it."""
    built = build_from_names(target, given, target.__name__, run)
    return built.value.values, built.notes


def run(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (ValueError, AssertionError) as error:
        raise UserError(str(error)) from error


class Recorder(nn.Module):
    """Remembers what it was built with."""

    def record(self, **values: Any) -> None:
        self.values = values


@dataclass
class GPTConfig:
    """Sizes of a large model as defaults."""

    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.1
    bias: bool = True


class GPT(Recorder):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.record(**vars(config))


@dataclass
class ModelArgs:
    """Values that another program sets, and others that follow from them."""

    dim: int = 4096
    n_layers: int = 32
    n_heads: int = 32
    n_kv_heads: Optional[int] = None  # noqa: UP045 - as released models have it
    vocab_size: int = -1
    multiple_of: int = 256
    norm_eps: float = 1e-5
    max_seq_len: int = 2048
    sizes: list[int] = field(default_factory=lambda: [1, 2])


class Llama(Recorder):
    def __init__(self, params: ModelArgs) -> None:
        super().__init__()
        self.record(**vars(params))


class Keywords(Recorder):
    def __init__(self, *, num_tokens, dim, depth, max_seq_len, heads=8, dim_head=64, causal=False, ff_mult=4) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.record(**{name: value for name, value in locals().items() if name not in ("self", "__class__")})


class Levels(Recorder):
    def __init__(
        self, *, num_tokens: int, dim: tuple[int, ...] | int, depth: tuple[int, ...], max_seq_len: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.record(num_tokens=num_tokens, dim=dim, depth=depth, max_seq_len=max_seq_len)


class Mixed(Recorder):
    def __init__(self, model_config: ModelArgs, vocab_size: int, pad_vocab_size_multiple: int | None = None) -> None:
        super().__init__()
        self.record(dim=model_config.dim, vocab_size=vocab_size, inner=model_config.vocab_size)


class Settings:
    """Settings that are set by name."""

    def __init__(self, **settings: Any) -> None:
        self.__dict__.update(settings)


class Defaulted(Recorder):
    @staticmethod
    def get_default_config() -> Settings:
        sizes = dict.fromkeys(("n_layer", "n_head", "n_embd", "vocab_size", "block_size"))
        return Settings(model_type="gpt", embd_pdrop=0.1, **sizes)

    def __init__(self, config: Settings) -> None:
        super().__init__()
        assert (config.model_type is None) != (config.n_layer is None)  # type: ignore[attr-defined]
        self.record(**vars(config))


class Coupled(Recorder):
    """Cuts its length in windows, which only the default window allows."""

    def __init__(self, num_tokens: int, dim: int, depth: int, seq_len: int = 512, window_size: int = 128) -> None:
        super().__init__()
        if window_size < 64 or seq_len % window_size:
            raise ValueError("the window must be at least 64 and divide the length")
        self.record(num_tokens=num_tokens, dim=dim, depth=depth, seq_len=seq_len, window_size=window_size)


class Baseline(Recorder):
    """Keywords alone, without defaults."""

    def __init__(self, vocab_size: int, num_layers: int, model_dim: int, num_heads: int, num_kv_heads: int, mlp_mult: int, tie_embeddings: bool, tied_embed_init_std: float, logit_softcap: float, rope_base: float, qk_gain_init: float) -> None:  # fmt: skip  # noqa: E501
        super().__init__()
        self.record(**{name: value for name, value in locals().items() if name not in ("self", "__class__")})


SMALL_GPT = {"block_size": 256, "vocab_size": 97, "n_layer": 2, "n_head": 4, "n_embd": 64}

BUILT: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "a dataclass of large defaults": (GPT, {**SMALL_GPT, "dropout": 0.1, "bias": True}),
    "values to be set": (
        Llama,
        {
            **{"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": None, "vocab_size": 97, "multiple_of": 256},
            **{"norm_eps": 1e-5, "max_seq_len": 256, "sizes": [1, 2]},
        },
    ),
    "keywords, made causal": (
        Keywords,
        {
            **{"num_tokens": 97, "dim": 64, "depth": 2, "max_seq_len": 256, "heads": 4, "dim_head": 16},
            **{"causal": True, "ff_mult": 4},
        },
    ),
    "tuples of two levels": (Levels, {"num_tokens": 97, "dim": 64, "depth": (2, 2), "max_seq_len": (32, 8)}),
    "a configuration and a size": (Mixed, {"dim": 64, "vocab_size": 97, "inner": 97}),
    "a default configuration": (Defaulted, {**SMALL_GPT, "model_type": None, "embd_pdrop": 0.1}),
    "sizes that only defaults allow": (
        Coupled,
        {"num_tokens": 97, "dim": 64, "depth": 2, "seq_len": 256, "window_size": 128},
    ),
    "eleven keywords without defaults": (
        Baseline,
        {
            **{"vocab_size": 97, "num_layers": 2, "model_dim": 64, "num_heads": 4, "num_kv_heads": 2, "mlp_mult": 2},
            **{"tie_embeddings": True, "tied_embed_init_std": 0.02, "logit_softcap": 30.0, "rope_base": 10_000.0},
            "qk_gain_init": 1.0,
        },
    ),
}


@pytest.mark.parametrize(("target", "expected"), BUILT.values(), ids=BUILT)
def test_a_small_model_follows_from_names(target: Callable[..., Any], expected: dict[str, Any]) -> None:
    values, notes = build(target)
    assert values == expected
    (note,) = notes
    changed = [name for name, value in expected.items() if f"{name}={value!r}" in note]
    assert len(changed) >= 2
    assert note.startswith(f"{target.__name__} was built with ")


class Small(Recorder):
    def __init__(self, vocab: int = 12, dim: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.record(vocab=vocab, dim=dim, heads=heads)


def test_small_defaults_stay() -> None:
    assert build(Small) == ({"vocab": 12, "dim": 8, "heads": 2}, ())


def test_given_values_change_one_and_the_others_fit() -> None:
    values, notes = build(GPT, n_embd="48", dropout="0", bias="false")
    assert (values["n_embd"], values["n_head"], values["dropout"], values["bias"]) == (48, 4, 0.0, False)
    assert "n_embd" not in notes[0]
    values, _ = build(Keywords, heads="3", causal="False", depth="1")
    assert (values["heads"], values["dim"], values["dim_head"], values["causal"], values["depth"]) == (
        3,
        48,
        16,
        False,
        1,
    )
    values, _ = build(Llama, n_kv_heads="2")
    assert values["n_kv_heads"] == 2
    assert build(Llama, n_kv_heads="none")[0]["n_kv_heads"] is None
    assert build(Levels, depth="(1, 3)")[0]["depth"] == (1, 3)


@pytest.mark.parametrize(
    "kept", [{"width": 48}, {"heads": 3}, {"head_width": 8}, {"width": 50}, {"width": 32, "head_width": 8}]
)
def test_sizes_fit_together(kept: dict[str, int]) -> None:
    sizes = fitting_sizes(kept)
    assert sizes["width"] % sizes["heads"] == 0
    assert sizes["heads"] * sizes["head_width"] == sizes["width"]
    assert sizes["heads"] % sizes["kv_heads"] == 0


class Flavored(Recorder):
    def __init__(self, vocab_size: int, flavor: str, tau: float) -> None:
        super().__init__()
        self.record(vocab_size=vocab_size, flavor=flavor, tau=tau)


class FromDictionary(nn.Module):
    def __init__(self, cfg) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.embed = nn.Embedding(cfg["vocab_size"], cfg["emb_dim"])
        self.drop = nn.Dropout(cfg["drop_rate"])


class Failing(nn.Module):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        raise ValueError("model.py:3: it raised")


REFUSED: dict[str, tuple[Callable[..., Any], dict[str, str], str]] = {
    "values that no name tells": (
        Flavored,
        {},
        "Flavored needs flavor, tau, which cannot be filled by name; give them, as in `flavor=VALUE`, or name a "
        "function that builds it:\n    from test_constructors import Flavored\n    def tiny():\n"
        "        return Flavored(vocab_size=97, flavor=..., tau=...)",
    ),
    "a dictionary": (
        FromDictionary,
        {},
        "FromDictionary reads a dictionary, 'cfg', which cannot be filled; name a function that builds it:\n    from "
        "test_constructors import FromDictionary\n    def tiny():\n        return FromDictionary(cfg={"
        '"vocab_size": 97, "emb_dim": 64, "drop_rate": 0.0})',
    ),
    "a constructor that raises": (
        Failing,
        {},
        "Failing cannot be built with vocab_size=97: model.py:3: it raised; say what fits, as in `vocab_size=VALUE`",
    ),
    "an unknown name": (GPT, {"n_layers": "2"}, "GPT has no parameter 'n_layers'; did you mean n_layer?"),
    "a value of another type": (GPT, {"n_layer": "two"}, "n_layer=two must be a whole number"),
    "a value for no parameter": (Recorder, {"dim": "2"}, "Recorder takes no values, so dim=2 cannot be given"),
}


@pytest.mark.parametrize(("target", "given", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_built_is_said_with_a_way_out(
    target: Callable[..., Any], given: dict[str, str], sentence: str
) -> None:
    with pytest.raises(UserError) as raised:
        build(target, **given)
    assert sentence in str(raised.value)


def test_what_is_missing_can_be_given() -> None:
    assert build(Flavored, flavor="sweet", tau="1")[0] == {"vocab_size": 97, "flavor": "sweet", "tau": 1.0}


class Lm(nn.Module):
    """A language model of the usual sizes, which computes."""

    def __init__(self, vocab_size: int, n_embd: int, n_layer: int, n_head: int, block_size: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, n_embd)
        self.places = nn.Embedding(block_size, n_embd)
        self.layers = nn.ModuleList(nn.MultiheadAttention(n_embd, n_head, batch_first=True) for _ in range(n_layer))
        self.head = nn.Linear(n_embd, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = x + layer(x, x, x, need_weights=False)[0]
        logits: Tensor = self.head(x)
        return logits


def test_a_model_built_from_names_gives_other_logits_for_other_tokens_up_to_its_length() -> None:
    model = build_from_names(Lm, {}, "Lm", lambda call: call()).value
    zeros = torch.zeros(1, 256, dtype=torch.long)
    assert not torch.equal(model(zeros)[0, -1], model(zeros + 96)[0, -1])
