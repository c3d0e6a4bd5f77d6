"""Faults in released packages, each measured by a few lines of its own, and what `manyformer check` says about them.

    pip install -e '.[hf,peers]' && python benchmarks/released_faults.py

A fault is measured without the contracts: tokens are exchanged, or a call is cut in two, and outputs that should be
equal are subtracted. The size is relative to the standard deviation of the logits. The models have random weights: a
fault of the code is in every checkpoint, and how much it matters depends on its weights. A package that is absent
is named and left out; `--packages FOLDER` is where `pip install --no-deps --target FOLDER` has put some. `--markdown`
prints the table of docs/leaks.md.
"""

import argparse
import sys
import warnings
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import manyformer as mf
from manyformer.analysis.contracts.check_report import ContractRow

VOCAB = 97
SIGNIFICANT = 1e-4
"""The least size, of the logits' standard deviation, that is a fault: rounding in float32 stays below 1e-5."""


class Measured(NamedTuple):
    """What was measured outside of the contracts: a size, or the sentence of an exception."""

    size: float
    sentence: str


class Fault(NamedTuple):
    """A fault of a released package; `contract` is the one that must fail, None where the model raises."""

    package: str
    where: str
    sentence: str
    build: Callable[[], nn.Module]
    measure: Callable[[nn.Module], Measured]
    contract: str | None
    length: int | None = None


class Result(NamedTuple):
    """A fault as it was found here; `release` is None where the package is not installed, `row` where nothing was
    checked."""

    fault: Fault
    release: str | None
    measured: Measured
    row: ContractRow | None = None

    @property
    def is_missing(self) -> bool:
        """Whether the package is here without the fault, or the checker does not see it."""
        if self.release is None:
            return False
        return not self.measured.size > SIGNIFICANT or (self.row is not None and self.row.verdict != "failed")

    def lines(self) -> list[str]:
        size = "" if self.measured.size in (0.0, float("inf")) else f"{self.measured.size:.1e}: "
        found = [f"{self.fault.package} {self.release or '(not installed)'} {self.fault.where}"]
        found.append(f"{size}{self.measured.sentence}")
        if self.row is not None:
            found.append(f"{self.row.contract} {self.row.verdict}: {self.row.sentence}")
            if self.row.place is not None:
                found += self.row.place.lines(160)
        if self.is_missing:
            found.append("NO FAULT HERE, OR NOT SEEN")
        return found


def logits_of(result: Any) -> Tensor:
    while isinstance(result, tuple):
        result = result[0]
    return getattr(result, "logits", result)


def random_tokens(length: int, seed: int = 0) -> Tensor:
    # the first ids are padding and other signs
    return torch.randint(5, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))


def relative(difference: Tensor, logits: Tensor) -> float:
    return float(difference.abs().max() / logits.std())


def future(length: int) -> Callable[[nn.Module], Measured]:
    """How much the outputs before a token change with it and all later ones, in float64."""

    def measure(module: nn.Module) -> Measured:
        module = module.double().eval()
        tokens = random_tokens(length)
        logits = logits_of(module(tokens))
        worst = Measured(0.0, "no earlier output changes")
        for start in range(1, length, max(length // 32, 1)):
            others = tokens.clone()
            others[:, start:] = random_tokens(length, seed=start + 1)[:, start:]
            size = relative((logits_of(module(others)) - logits)[:, :start], logits)
            if size > worst.size:
                worst = Measured(size, f"tokens from {start} of {length} change outputs before them")
        return worst

    return measure


def padding(side: str, length: int = 40, padded: int = 12) -> Callable[[nn.Module], Measured]:
    """How much the outputs of a text change if the tokens under its attention mask are exchanged."""

    def measure(module: nn.Module) -> Measured:
        module = module.eval()
        tokens = random_tokens(length)
        hidden = slice(0, padded) if side == "left" else slice(length - padded, length)
        mask = torch.ones_like(tokens)
        mask[:, hidden] = 0
        others = tokens.clone()
        others[:, hidden] = random_tokens(length, seed=1)[:, hidden]
        logits = logits_of(module(input_ids=tokens, attention_mask=mask))
        change = logits_of(module(input_ids=others, attention_mask=mask)) - logits
        size = relative(change[mask.bool()], logits)
        return Measured(
            size, f"{padded} tokens under the attention mask, on the {side}, change the outputs of the others"
        )

    return measure


def second_chunk(module: nn.Module) -> Measured:
    """How far the second half of a text, read with the cache of the first half, is from one pass."""
    module = module.eval()
    tokens = random_tokens(24)
    logits = logits_of(module(tokens))
    first = module(tokens[:, :12], use_cache=True)
    name = next(name for name in first if name != "logits")
    second = logits_of(module(tokens[:, 12:], use_cache=True, **{name: first[name]}))
    return Measured(relative(second - logits[:, 12:], logits), "12 tokens after a cache of 12 differ from one pass")


def returned_cache(module: nn.Module) -> Measured:
    """How far steps with a returned cache, which get the whole prefix, are from one pass."""
    module = module.eval()
    tokens = random_tokens(24)
    logits = module(tokens)
    _, cache = module(tokens[:, :12], return_cache=True)
    worst = Measured(0.0, "no step differs")
    for length in range(13, 25):
        step, cache = module(tokens[:, :length], cache=cache, return_cache=True)
        size = relative(step[:, -1] - logits[:, length - 1], logits)
        if size > worst.size:
            worst = Measured(size, f"step {length - 12} after a prompt of 12 differs from one pass")
    return worst


def raises(length: int) -> Callable[[nn.Module], Measured]:
    """The exception at a length that the model should take."""

    def measure(module: nn.Module) -> Measured:
        try:
            module.eval()(random_tokens(length))
        except Exception as error:
            return Measured(float("inf"), f"{length} tokens raise {type(error).__name__}: {str(error).splitlines()[0]}")
        return Measured(0.0, f"{length} tokens do not raise")

    return measure


def transformers_model(kind: str, family: str, **sizes: Any) -> nn.Module:
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0} | sizes
    config = getattr(transformers, f"{family}Config")(vocab_size=VOCAB, **sizes)
    return getattr(transformers, f"{family}For{kind}")(config)


def big_bird() -> nn.Module:
    return transformers_model(
        "CausalLM",
        "BigBird",
        is_decoder=True,
        attention_type="block_sparse",
        block_size=16,
        num_random_blocks=1,
        num_attention_heads=2,
        intermediate_size=64,
    )


def local_transformer() -> nn.Module:
    from local_attention import LocalTransformer

    return LocalTransformer(
        num_tokens=VOCAB, dim=32, depth=2, max_seq_len=256, heads=2, dim_head=16, causal=True, local_attn_window_size=16
    )


def performer() -> nn.Module:
    from performer_pytorch import PerformerLM

    return PerformerLM(
        num_tokens=VOCAB, dim=32, depth=2, heads=2, max_seq_len=256, causal=True, dim_head=16, nb_features=16
    )


def routing_transformer() -> nn.Module:
    from routing_transformer import RoutingTransformerLM

    return RoutingTransformerLM(
        num_tokens=VOCAB, dim=32, depth=2, heads=4, max_seq_len=256, window_size=16, causal=True
    )


class WithHead(nn.Module):
    """A language model of one layer of a package: embeddings, the layer and logits."""

    def __init__(self, layer: nn.Module, dim: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dim)
        self.layer = layer
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(x + self.layer(x))


def colt5_attention() -> nn.Module:
    from colt5_attention import ConditionalRoutedAutoregressiveAttention

    layer = ConditionalRoutedAutoregressiveAttention(
        dim=32,
        light_dim_head=16,
        light_heads=2,
        light_window_size=16,
        heavy_window_size=16,
        heavy_dim_head=16,
        heavy_heads=2,
        num_heavy_tokens_q=4,
        num_heavy_tokens_kv=4,
    )
    return WithHead(layer)


def projected_values() -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=32, depth=2, heads=2, attn_dim_head=16, attn_orthog_projected_values=True)
    return TransformerWrapper(num_tokens=VOCAB, max_seq_len=256, attn_layers=layers)


def token_shift() -> nn.Module:
    from token_shift_gpt import TokenShiftGPT

    return TokenShiftGPT(num_tokens=VOCAB, dim=32, max_seq_len=256, depth=2)


def hourglass() -> nn.Module:
    from hourglass_transformer_pytorch import HourglassTransformerLM

    return HourglassTransformerLM(
        num_tokens=VOCAB, dim=32, max_seq_len=256, heads=2, dim_head=16, shorten_factor=2, depth=(1, 1, 1), causal=True
    )


class Paused(nn.Module):
    """A pause transformer without pauses, whose own result has an axis for them."""

    def __init__(self) -> None:
        super().__init__()
        from pause_transformer import PauseTransformer

        self.model = PauseTransformer(num_tokens=VOCAB, dim=32, depth=2, max_pause_length=2, dim_head=16, heads=2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)[0]


FAULTS = (
    Fault(
        "transformers",
        "`BigBirdForCausalLM`, block-sparse",
        "global and random blocks are attended to without a causal mask",
        big_bird,
        future(512),
        "causal",
        512,
    ),
    Fault(
        "transformers",
        "`FalconMambaForCausalLM`",
        "several tokens after a cache begin with an empty state; single ones do not",
        lambda: transformers_model("CausalLM", "FalconMamba", state_size=4),
        second_chunk,
        "prefill",
    ),
    Fault(
        "transformers",
        "`MambaForCausalLM`",
        "the same",
        lambda: transformers_model("CausalLM", "Mamba", state_size=4),
        second_chunk,
        "prefill",
    ),
    Fault(
        "transformers",
        "`RwkvForCausalLM`",
        "the attention mask is taken and not used: padding before a prompt enters the state",
        lambda: transformers_model("CausalLM", "Rwkv", attention_hidden_size=32, intermediate_size=64),
        padding("left"),
        "padding-left",
    ),
    Fault(
        "transformers",
        "`RecurrentGemmaForCausalLM`",
        "padding before a prompt enters the recurrent state and the convolution",
        lambda: transformers_model(
            "CausalLM", "RecurrentGemma", num_hidden_layers=3, num_attention_heads=2, intermediate_size=64, lru_width=32
        ),
        padding("left"),
        "padding-left",
    ),
    Fault(
        "transformers",
        "`ConvBertForMaskedLM`",
        "the convolution of the mixed attention reads padding",
        lambda: transformers_model(
            "MaskedLM", "ConvBert", embedding_size=32, num_attention_heads=2, intermediate_size=64
        ),
        padding("right"),
        "padding-right",
    ),
    Fault(
        "transformers",
        "`MobileBertForMaskedLM`",
        "the embeddings of neighbors are joined, those of padding too",
        lambda: transformers_model(
            "MaskedLM",
            "MobileBert",
            embedding_size=32,
            num_attention_heads=2,
            intermediate_size=64,
            true_hidden_size=16,
            intra_bottleneck_size=16,
        ),
        padding("right"),
        "padding-right",
    ),
    Fault(
        "local-attention",
        "`LocalTransformer`, rotary by default",
        "the cache keeps rotated keys and rotates them again; `generate` decodes so",
        local_transformer,
        returned_cache,
        "cached",
    ),
    Fault(
        "performer-pytorch",
        "`PerformerLM(causal=True)`",
        "keys are stabilized by their maximum over the whole sequence, and a constant added after it does not cancel",
        performer,
        future(64),
        "causal",
        64,
    ),
    Fault(
        "routing-transformer",
        "`RoutingTransformerLM(causal=True)`",
        "each cluster takes its tokens among the whole sequence, so that later ones push earlier ones out",
        routing_transformer,
        future(64),
        "causal",
        64,
    ),
    Fault(
        "colt5-attention",
        "`ConditionalRoutedAutoregressiveAttention`",
        "which queries of a window get the heavy attention depends on the later ones of it",
        colt5_attention,
        future(64),
        "causal",
        64,
    ),
    Fault(
        "x-transformers",
        "`Decoder(attn_orthog_projected_values=True)`",
        "outputs are projected with one coefficient for the whole sequence, which is flattened",
        projected_values,
        future(64),
        "causal",
        64,
    ),
    Fault(
        "token-shift-gpt",
        "`TokenShiftGPT`",
        "sequences shorter than half of the longest raise, so that no short prompt can be continued",
        token_shift,
        raises(64),
        None,
    ),
    Fault(
        "hourglass-transformer-pytorch",
        "`HourglassTransformerLM(causal=True)`",
        "lengths that are no multiple of the shortening raise: `math` is not imported",
        hourglass,
        raises(63),
        None,
    ),
    Fault(
        "pause-transformer",
        "`PauseTransformer`",
        "every call raises with this release of PyTorch: a mask of floating numbers",
        Paused,
        raises(64),
        None,
    ),
)


def find(fault: Fault, *, checked: bool) -> Result:
    """Measure one fault, and check the model by the contract that it should break."""
    try:
        release = version(fault.package)
        torch.manual_seed(0)
        with torch.no_grad():
            measured = fault.measure(fault.build())
    except (PackageNotFoundError, ImportError) as error:
        return Result(fault, None, Measured(0.0, f"not measured: {error}"))
    except SystemExit:
        return Result(fault, None, Measured(0.0, "not measured: the package ends the process without its companions"))
    if fault.contract is None or not checked:
        return Result(fault, release, measured)
    torch.manual_seed(0)
    # the model as a stranger has it: in float32, in evaluation mode, and without an adapter
    report = mf.check(fault.build().eval(), only=[fault.contract], length=fault.length)
    return Result(fault, release, measured, report[fault.contract])


def markdown(results: Iterable[Result]) -> str:
    lines = ["| release | where | fault | size | contract, and its place |", "| --- | --- | --- | --: | --- |"]
    for result in results:
        if result.release is None:
            continue
        fault = result.fault
        size = "raises" if result.measured.size == float("inf") else f"{result.measured.size:.1g}"
        contract = "" if fault.contract is None else f"`{fault.contract}`"
        if result.row is not None and result.row.place is not None and result.row.place.module is not None:
            contract = f"{contract}, `{result.row.place.module}`"
        lines.append(f"| {fault.package} {result.release} | {fault.where} | {fault.sentence} | {size} | {contract} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", metavar="FOLDER", action="append", default=[], help="further packages")
    parser.add_argument("--only", nargs="*", default=[], help="parts of packages' or models' names")
    parser.add_argument("--no-check", action="store_true", help="measure alone")
    parser.add_argument("--markdown", action="store_true", help="print a table in Markdown")
    arguments = parser.parse_args()
    sys.path += arguments.packages
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results = []
    for fault in FAULTS:
        if arguments.only and not any(part in f"{fault.package} {fault.where}" for part in arguments.only):
            continue
        result = find(fault, checked=not arguments.no_check)
        results.append(result)
        if not arguments.markdown:
            print("\n    ".join(result.lines()), flush=True)
    if arguments.markdown:
        print(markdown(results))
    return 1 if any(result.is_missing for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
