"""Hybrids: layers of several kinds by a pattern, and attention whose outputs are gated."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.conversion.hugging_face.families.llama import LLAMA
from manyformer.nn.core import Context, Layer, contiguous_positions, state_bytes
from manyformer.nn.positions import NoPosition, RotaryPosition
from manyformer.nn.runtime.length_norms import RMSNorm
from manyformer.recipes.parts.layer_patterns import LayerKind, parse_pattern
from manyformer.recipes.parts.mixer_letters import MIXER_LETTERS, MixerSizes

SMALL: dict[str, Any] = {"vocab": 11, "dim": 16, "heads": 2, "position": "rope"}
CONTRACTS = ["causal", "cached", "padding-state", "packing-state", "beams"]


@pytest.mark.parametrize(
    ("pattern", "kernel", "depth"),
    [("DDF", "softmax", 4), ("KNDF", "linear", 3), ("KN", "window", 2), ("PXVTF", "softmax", 5)],
)
def test_hybrids_keep_their_promises(pattern: str, kernel: str, depth: int) -> None:
    model = mf.build("compose", **SMALL, depth=depth, pattern=pattern, kernel=kernel)
    report = mf.check(model, only=CONTRACTS, length=16)
    assert report.ok, report.table()


def test_layers_are_those_of_their_letters_and_full_ones_alone_cache_tokens() -> None:
    model: Any = mf.build("compose", **SMALL, depth=5, pattern="KNDF", kernel="linear")
    layers = [model.get_submodule(f"body.{number}.attention.inner") for number in range(5)]
    assert [type(layer.kernel).__name__[:7] for layer in layers] == [
        "LinearK",
        "Softmax",
        "LinearK",
        "Softmax",
        "LinearK",
    ]
    assert [isinstance(layer.position, RotaryPosition) for layer in layers] == [True, False, False, True, True]
    assert isinstance(layers[1].position, NoPosition)
    with torch.no_grad():
        sizes = [
            state_bytes(model(torch.zeros(1, n, dtype=torch.long), state=model.init_state(1)).state) for n in (8, 9)
        ]
    # keys and values of two layers, and the position and segment of the token
    assert sizes[1] - sizes[0] <= 2 * (2 * 16 * 4 + 2 * 8)
    assert sizes[1] - sizes[0] >= 2 * 2 * 16 * 4


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"pattern": "KQ"}, r"pattern \('KQ'\): 'Q' at place 2 is no mixer; possible are K \(the kernel\), F "),
        ({"pattern": ""}, r"pattern \(''\) must have one layer or more"),
        ({"pattern": "K(MF"}, "the '\\(' at place 2 is not closed"),
        ({"pattern": "(M)K"}, "at place 1 hold mixers side by side, so at least two"),
        ({"pattern": "(M-)"}, "'-' at place 3 is no mixer"),
        ({"pattern": "K.."}, "'.' at place 3 follows no mixer"),
        (
            {"pattern": "FF", "state_dim": 8},
            r"state_dim \(8\) is that of layers M, m, T, of which the pattern has none",
        ),
        ({"pattern": "FF", "window": 8}, r"window \(8\) is that of layers W"),
        ({"pattern": "FF", "num_experts": 4}, r"num_experts \(4\) is that of layers E"),
        ({"pattern": "DF", "memory_key_heads": 3}, r"memory_key_heads \(3\) must divide the heads of the memory \(2\)"),
        ({"pattern": "MF", "memory_heads": 3}, r"the heads of layers M \(3\) must divide 2 dim \(32\)"),
        ({"pattern": "E", "experts_per_token": 9}, r"experts_per_token \(9\) must be from 2 to num_experts \(8\)"),
        ({"pattern": "FW", "position": "fox"}, "has W, a window, but position fox has a kernel without one"),
        ({"pattern": "FY", "position": "fox"}, "has Y, .* position fox is computed by the kernel of each layer"),
        ({"pattern": "FY", "residual_streams": "reversible"}, "has Y, .* it needs residual_streams=plain, not rev"),
        ({"pattern": "FY", "loops": 2}, r"has Y, .* loops \(2\) would project them again"),
        ({"pattern": "FY", "canon": "A"}, "has Y, .* parts of baseline-2026, such as canon, need layers with keys"),
        ({"pattern": "DF", "shared_layers": "M"}, r"shared_layers \('M'\) has M, which pattern \('DF'\) has not"),
        (
            {"pattern": "DF", "shared_layers": "F", "residual_streams": "reversible"},
            r"shared_layers \('F'\) need residual_streams=plain, not reversible",
        ),
        ({"pattern": "FF", "shared_layers": "F", "smear": True}, "applied several times .loops, shared_layers."),
        ({"pattern": "Fm", "value_embeddings": True}, "change projected values: a MambaMixer has none"),
        ({"pattern": "mF", "canon": "B"}, "canon B convolves queries, keys and values, and a MambaMixer has none"),
        ({"pattern": "KN", "position": "sinusoid"}, "position sinusoid is none of single layers"),
        ({"pattern": "DF", "kernel": "linear"}, "kernel linear is that of layers K"),
    ],
)
def test_patterns_that_leave_something_out_are_refused(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        mf.build("compose", **(SMALL | keywords), depth=2)


def test_the_gate_of_llama_multiplies_the_outputs_of_heads() -> None:
    """An open gate of 1/2 everywhere halves what attention adds; no class has it without what else Qwen3-Next has."""
    sizes: dict[str, Any] = {"vocab": 11, "dim": 16, "depth": 1, "heads": 2}
    gated: Any = mf.build("llama", **sizes, output_gate=True)
    plain: Any = mf.build("llama", **sizes)
    plain.load_state_dict(gated.state_dict(), strict=False)
    with torch.no_grad():
        gated.get_submodule("body.0.attention.inner.output_stage.gate.up").weight.zero_()
        plain.get_submodule("body.0.attention.inner.out_proj").weight.mul_(0.5)
    tokens = torch.randint(0, 11, (2, 9))
    torch.testing.assert_close(gated(tokens).logits, plain(tokens).logits)
    with pytest.raises(UserError, match="output_gate is True"):
        LLAMA.write_config({**gated.spec.keywords, "ff_dim": 48})


LETTERS = dict.fromkeys("MF", "")


def test_a_pattern_is_read_as_its_grammar_says() -> None:
    kinds = parse_pattern("MF.(MF)(FM).-E", LETTERS)
    assert kinds == [
        LayerKind("M", "-"),
        LayerKind("F", ""),
        LayerKind("MF", "-"),
        LayerKind("FM", ""),
        LayerKind("", "-"),
        LayerKind("", "E"),
    ]


# the recipe whose layer a letter is, with the keywords of sizes that the recipe has
RECIPES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "D": (
        "gated-deltanet",
        {"head_dim": 6, "value_dim": 4, "key_heads": 2, "conv_size": 3, "negative_eigenvalues": True},
        {
            "memory_key_dim": 6,
            "memory_value_dim": 4,
            "memory_key_heads": 2,
            "conv_size": 3,
            "negative_eigenvalues": True,
        },
    ),
    "d": ("deltanet", {"head_dim": 6, "conv_size": 3}, {"memory_key_dim": 6, "conv_size": 3}),
    "A": ("kda", {"head_dim": 6, "conv_size": 3}, {"memory_key_dim": 6, "conv_size": 3}),
    "P": (
        "deltaproduct",
        {"head_dim": 6, "value_dim": 4, "conv_size": 3},
        {"memory_key_dim": 6, "memory_value_dim": 4, "conv_size": 3},
    ),
    "X": (
        "gdn-2",
        {"head_dim": 6, "value_dim": 4, "negative_eigenvalues": True},
        {"memory_key_dim": 6, "memory_value_dim": 4, "negative_eigenvalues": True},
    ),
    "V": ("comba", {"head_dim": 6, "value_dim": 4}, {"memory_key_dim": 6, "memory_value_dim": 4}),
    "M": ("mamba-2", {"groups": 2, "state_dim": 6}, {"memory_key_heads": 2, "state_dim": 6}),
    "T": ("mamba-3", {"state_dim": 8}, {"state_dim": 8}),
    "m": (
        "mamba",
        {"state_dim": 5, "conv_size": 3, "negative_eigenvalues": True},
        {"state_dim": 5, "conv_size": 3, "negative_eigenvalues": True},
    ),
    "R": ("retnet", {}, {}),
    "G": ("gla", {"head_dim": 6}, {"memory_key_dim": 6}),
    "H": ("hgrn2", {"head_dim": 6}, {"memory_key_dim": 6}),
    "L": ("lightning", {"head_dim": 6}, {"memory_key_dim": 6}),
    "S": ("mlstm", {"head_dim": 6}, {"memory_key_dim": 6}),
    "l": ("lstm-lm", {}, {}),
}
WITHOUT_RECIPE = {"C"}


def test_every_letter_of_a_recipe_is_compared_with_it() -> None:
    assert RECIPES.keys() | WITHOUT_RECIPE == MIXER_LETTERS.keys()


@pytest.mark.parametrize("letter", RECIPES)
def test_a_letter_is_the_layer_of_its_recipe(letter: str) -> None:
    recipe, of_recipe, of_letter = RECIPES[letter]
    sizes: dict[str, Any] = {"vocab": 11, "dim": 16, "depth": 3}
    if letter not in "ml":
        of_recipe = {**of_recipe, "heads": 4}
    ours: Any = mf.build("compose", **sizes, heads=4, position="none", pattern=letter, **of_letter)
    theirs: Any = mf.build(recipe, **sizes, **of_recipe)
    name = "body.2.mixer.inner" if letter in "mlT" else "body.2.attention.inner"
    mixer, reference = ours.get_submodule(name).double(), theirs.get_submodule(name).double()
    mixer.load_state_dict(reference.state_dict())
    x = torch.randn(2, 13, 16, dtype=torch.float64)
    ctx = Context(contiguous_positions(2, 0, 13, x.device))
    torch.testing.assert_close(mixer(x, ctx).y, reference(x, ctx).y)


def test_parallel_mixers_are_the_sum_of_each_alone() -> None:
    model: Any = mf.build("compose", **SMALL, depth=1, pattern="(MWm)").double()
    branch = model.get_submodule("body.0.mixer")
    x = torch.randn(2, 13, 16, dtype=torch.float64)
    ctx = Context(contiguous_positions(2, 0, 13, x.device))
    normed = branch.pre_norm(x)
    heads = [branch.inner.get_submodule(f"heads{place}") for place in range(3)]
    torch.testing.assert_close(branch(x, ctx).y, x + sum(mixer(normed, ctx).y for mixer in heads))
    assert len(branch.init_state(2, device=x.device, dtype=x.dtype)) == 3


def test_a_layer_has_the_branches_that_its_place_says() -> None:
    model: Any = mf.build("compose", **SMALL, depth=5, pattern="MF.-Em")
    names = [[name for name, _ in model.get_submodule(f"body.{number}").named_children()] for number in range(5)]
    assert names == [["attention", "ff"], ["attention"], ["ff"], ["ff"], ["mixer", "ff"]]
    assert model.get_submodule("body.3.ff.inner").router.num_experts == 8


def test_a_mixer_and_experts_in_two_layers_are_what_they_are_in_one() -> None:
    """Pre-norm branches do not know their layer, so that M.- is M."""
    tokens = torch.randint(0, 11, (2, 9))
    one: Any = mf.build("compose", **SMALL, depth=1, pattern="M").double()
    two: Any = mf.build("compose", **SMALL, depth=2, pattern="M.-").double()
    renamed = {name.replace("body.0.ff", "body.1.ff"): tensor for name, tensor in one.state_dict().items()}
    two.load_state_dict(renamed)
    torch.testing.assert_close(one(tokens).logits, two(tokens).logits)


# every letter once beside each of the two kinds of neighbours: softmax in its forms, and another memory
@pytest.mark.parametrize("pattern", ["(AW)d.N", "m(RF)G", "H-LE", "(Sl)CY", "WYmY"])
def test_hybrids_of_all_letters_keep_their_promises(pattern: str) -> None:
    model = mf.build("compose", **SMALL, depth=4, pattern=pattern)
    report = mf.check(model, only=["causal", "cached", "padding-state", "packing-state", "preallocated"], length=12)
    assert report.ok, report.table()


def test_a_new_letter_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def maker(sizes: MixerSizes) -> Callable[[int], Layer]:
        return MIXER_LETTERS["C"].maker(sizes)

    monkeypatch.setitem(MIXER_LETTERS, "Z", MIXER_LETTERS["C"]._replace(meaning="a copy", maker=maker))
    model: Any = mf.build("compose", **SMALL, depth=2, pattern="(ZF)Z")
    assert type(model.get_submodule("body.1.mixer.inner")).__name__ == "GatedConvolution"


def test_shared_layers_have_one_set_of_weights_and_a_state_in_each_place() -> None:
    """As in Zamba: the attention block is one, whatever lies between its places."""
    sizes: dict[str, Any] = {**SMALL, "depth": 6, "pattern": "MMF"}
    shared: Any = mf.build("compose", **sizes, shared_layers="F").double()
    apart: Any = mf.build("compose", **sizes).double()
    one_layer = sum(weight.numel() for weight in apart.get_submodule("body.5").parameters())
    count = [sum(weight.numel() for weight in model.parameters()) for model in (apart, shared)]
    assert count[0] - count[1] == one_layer
    assert len(list(shared.named_parameters())) == len({id(weight) for weight in shared.parameters()})
    tensors = shared.state_dict()
    tensors |= {name.replace("body.2.", "body.5."): tensor for name, tensor in tensors.items() if "body.2." in name}
    apart.load_state_dict(tensors)
    tokens = torch.randint(0, 11, (2, 9))
    torch.testing.assert_close(shared(tokens).logits, apart(tokens).logits)
    with torch.no_grad():
        states = [model(tokens, state=model.init_state(2)).state for model in (shared, apart)]
    assert state_bytes(states[0]) == state_bytes(states[1])
    report = mf.check(mf.build("compose", **sizes, shared_layers="F"), only=CONTRACTS, length=16)
    assert report.ok, report.table()


def reference_of_shared_keys(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """YOCO as its section 2 has it, without positions: one projection at the border, softmax in every upper layer."""
    body = model.body
    ctx = Context(contiguous_positions(len(tokens), 0, tokens.shape[1], tokens.device))
    x = model.embed(tokens, ctx.positions)
    for number in range(2):
        x = body.get_submodule(str(number))(x, ctx).y
    k, v = body.keys.kv_proj(body.keys.norm(x)).unflatten(-1, (2, 1, 8)).unbind(2)
    visible = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
    for number in (2, 3):
        branch = body.get_submodule(f"{number}.attention")
        q = branch.inner.q_proj(branch.pre_norm(x)).unflatten(-1, (2, 8))
        scores = torch.einsum("blhe,bshe->bhls", q, k.expand_as(q)) / 8**0.5
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        heads = torch.einsum("bhls,bshe->blhe", weights, v.expand_as(q))
        x = x + branch.inner.out_proj(heads.flatten(2))
        x = body.get_submodule(f"{number}.ff")(x, ctx).y
    logits: torch.Tensor = model.head(body.norm(x, ctx).y)
    return logits


def test_layers_that_share_keys_are_those_of_yoco() -> None:
    sizes: dict[str, Any] = {"vocab": 11, "dim": 16, "heads": 2, "kv_heads": 1, "position": "none", "depth": 4}
    model: Any = mf.build("compose", **sizes, pattern="WWYY").double()
    tokens = torch.randint(0, 11, (2, 9))
    expected = reference_of_shared_keys(model, tokens)
    torch.testing.assert_close(model(tokens).logits, expected)
    gradients = []
    for logits in (model(tokens).logits, expected):
        model.zero_grad()
        logits.square().sum().backward()
        gradients.append({name: weight.grad.clone() for name, weight in model.named_parameters()})
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("is_preallocated", [False, True])
def test_layers_that_share_keys_keep_those_of_one_layer(*, is_preallocated: bool) -> None:
    tokens = torch.randint(0, 11, (1, 9))
    bytes_of_token = {}
    with torch.no_grad():
        for pattern in ("FFFFFF", "FFYYYY"):
            model: Any = mf.build("compose", **SMALL, depth=6, pattern=pattern)
            sizes = []
            for length in (8, 9):
                state = model.init_state(1, capacity=length if is_preallocated else None)
                sizes.append(state_bytes(model(tokens[:, :length], state=state).state))
            bytes_of_token[pattern] = sizes[1] - sizes[0]
    # keys and values of a token in one layer are 2 * 16 numbers of 4 bytes, beside its position and document
    one_layer = 2 * 16 * 4 + 2 * 8
    assert bytes_of_token == {"FFFFFF": 6 * one_layer, "FFYYYY": 3 * one_layer}


def test_samba_is_mamba_and_windows_in_turn() -> None:
    """The same as `compose` has them, whose embedding is multiplied, and whose attention has biases, 0 at first."""
    sizes: dict[str, Any] = {"vocab": 11, "dim": 16, "depth": 4, "heads": 2, "kv_heads": 1, "window": 3}
    samba: Any = mf.build("samba", **sizes, tied=True, norm_eps=1e-6).double()
    parts: dict[str, Any] = {"pattern": "mW", "position": "rope", "feedforward": "swiglu", "norm_kind": "rms"}
    composed: Any = mf.build("compose", **sizes, **parts).double()
    for module in composed.modules():
        if isinstance(module, RMSNorm):
            module.eps = 1e-6
    tensors = samba.state_dict()
    tensors |= {name: tensors[name] / 4 for name in ("embed.token.weight", "head.weight")}
    # rotations of channel n and n + e / 2 there, of adjacent ones here
    for number in (1, 3):
        for name, rows in (
            (f"body.{number}.attention.inner.q_proj.weight", 16),
            (f"body.{number}.attention.inner.kv_proj.weight", 8),
        ):
            weight = tensors[name].clone()
            weight[:rows] = weight[:rows].unflatten(0, (-1, 2, 4)).transpose(1, 2).flatten(0, 2)
            tensors[name] = weight
    missing, unexpected = composed.load_state_dict(tensors, strict=False)
    assert not unexpected
    assert all(name.endswith("bias") for name in missing)
    tokens = torch.randint(0, 11, (2, 9))
    torch.testing.assert_close(composed(tokens).logits * 4, samba(tokens).logits)
