"""Jobs that decide constants of the kernels, with candidates and the modules that hold each."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from manyformer.models import head
from manyformer.nn import Kernel, KernelCall, LSHKernel, SoftmaxKernel
from manyformer.nn import masks as m
from manyformer.nn.clustered import chunk_gather_attention, sinkhorn_attention
from manyformer.nn.convolution import depthwise_convolution
from manyformer.nn.core import ContiguousLayout, PackedLayout, TokenPositions
from manyformer.nn.linear import matrix_recurrence
from manyformer.nn.ops import attention_with_lse, top_products
from manyformer.nn.positions import (
    AlibiPosition,
    DistanceAwarePosition,
    NoPosition,
    Position,
    ShawPosition,
    TransformerXLPosition,
)
from manyformer.nn.recurrent import rwkv_time_mixing as token_mixtures
from manyformer.nn.recurrent import selective_scan
from manyformer.nn.runtime import device_reads
from manyformer.nn.softmax import (
    adaptive_span_kernel,
    band,
    block_cover,
    block_sparse_attention,
    distance_vector_attention,
    softmax_forms,
    softmax_kernel,
    sparse_plan,
    tiled_attention,
    toeplitz_attention,
)
from manyformer.nn.softmax.adaptive_span_kernel import AdaptiveSpanKernel, LearnedAttentionSpans

HEADS, WIDTH = 4, 64

Job = Callable[[], object]


class Place(NamedTuple):
    """A constant of a module, or an entry of a table of it, that holds a cost."""

    module: Any
    name: str
    key: object = None

    def __str__(self) -> str:
        key = "" if self.key is None else f"[{self.key!r}]"
        return f"{self.module.__name__}.{self.name}{key}"

    def get(self) -> Any:
        """The value in use."""
        value = getattr(self.module, self.name)
        return value if self.key is None else value[self.key]

    def put(self, value: object) -> None:
        """Let the module use this value."""
        if self.key is None:
            setattr(self.module, self.name, value)
        else:
            getattr(self.module, self.name)[self.key] = value


class Sweep(NamedTuple):
    """The constant that holds a size, or several that are set alike, its candidates, and the job that decides."""

    places: Sequence[Place]
    candidates: Sequence[Any]
    make_job: Callable[[], Job]


def positions(lengths: Sequence[int]) -> TokenPositions:
    """One row of documents of these lengths."""
    ends = list(itertools.accumulate(lengths))
    segment_ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    position_ids = torch.cat([torch.arange(length) for length in lengths])[None]
    documents = tuple((0, end - length, end) for length, end in zip(lengths, ends, strict=True))
    layout = ContiguousLayout() if len(lengths) == 1 else PackedLayout(documents)
    return TokenPositions(position_ids, segment_ids, layout)


def attention(
    kernel: Kernel, *lengths: int, position: Position | None = None, values: int = WIDTH, repeats: int = 1
) -> Job:
    """Forward and backward of a kernel on documents of these lengths."""
    place, position = positions(lengths), NoPosition() if position is None else position
    q, k = (torch.randn(1, HEADS, sum(lengths), WIDTH, requires_grad=True) for _ in range(2))
    v = torch.randn(1, HEADS, sum(lengths), values, requires_grad=True)
    upstream = torch.randn(1, HEADS, sum(lengths), values)

    def job() -> None:
        for _ in range(repeats):
            kernel(KernelCall(q, q if kernel.tied_qk else k, v, place, place, position)).y.backward(upstream)

    return job


def rows_with_roles(length: int, *, layers: int = 6) -> Job:
    """The same in several layers, on tokens with roles that no call has had before, so that no earlier plan serves."""
    kernel = SoftmaxKernel(m.Window(64))
    q, k, v, upstream = (torch.randn(1, HEADS, length, WIDTH, requires_grad=True) for _ in range(4))

    def job() -> None:
        place = positions((length,))
        place = place._replace(roles=torch.zeros_like(place.position_ids))
        for _ in range(layers):
            kernel(KernelCall(q, k, v, place, place, NoPosition())).y.backward(upstream)

    return job


def scan(rows: int, length: int, *, channels: int = 160, state: int = 16) -> Job:
    """A selective scan forward and backward."""
    x, steps, writes, reads = (torch.rand(rows, length, width) for width in (channels, channels, state, state))
    rates, memory = -torch.rand(channels, state, requires_grad=True), torch.zeros(rows, channels, state)
    return lambda: selective_scan.selective_scan(x, steps, rates, writes, reads, memory).y.sum().backward()


def convolution(rows: int, length: int, channels: int, taps: int = 4) -> Job:
    """A short convolution forward and backward."""
    x, weight = torch.randn(rows, length, channels, requires_grad=True), torch.randn(taps, channels, requires_grad=True)
    return lambda: depthwise_convolution.convolve_rows(x, weight, causal=True).sum().backward()


def mixtures(rows: int, length: int, channels: int, shares: int = 6) -> Job:
    """The shifted tokens of RWKV-7 forward and backward."""
    x, other = (torch.randn(rows, length, channels, requires_grad=True) for _ in range(2))
    share = torch.rand(shares, channels, requires_grad=True)
    return lambda: torch.autograd.backward(list(token_mixtures.mix_tokens(x, other, share)), [x.detach()] * shares)


def sequence(*jobs: Job) -> Job:
    """All jobs, one after the other."""
    return lambda: [job() for job in jobs]


def channel_decays() -> Job:
    """A recurrence with one decay for each channel, too strong for products of matrices."""
    a, c, v = (torch.randn(1, HEADS, 2048, WIDTH, requires_grad=True) for _ in range(3))
    decay = -40.0 * torch.rand(1, HEADS, 2048, WIDTH)
    return lambda: matrix_recurrence.chunked(a, c, v, decay).y.sum().backward()


def small_batches() -> Job:
    """Many small attentions."""
    q, k, v = (torch.randn(256, HEADS, 64, WIDTH, requires_grad=True) for _ in range(3))
    return lambda: sinkhorn_attention.small_batch_attention(q, k, v, scale=0.1).sum().backward()


def search() -> Job:
    """The nearest of many keys."""
    q, k = torch.randn(HEADS, 512, WIDTH), torch.randn(HEADS, 65536, WIDTH)
    return lambda: top_products.top_products(q, k, 32)


def losses(*classes: int) -> Job:
    """The loss of a classifier, forward and backward."""

    def loss(classifier: head.ClassHead, x: Tensor, targets: Tensor) -> None:
        classifier.loss(x, targets, label_smoothing=0.0).total.backward()

    x = torch.randn(1024, 128, requires_grad=True)
    return sequence(*(partial(loss, head.ClassHead(128, n), x, torch.randint(n, (1024,))) for n in classes))


def block_local(path: str = "auto", **keywords: Any) -> SoftmaxKernel:
    return SoftmaxKernel(m.Window(256), path=path, **keywords)  # type: ignore[arg-type]


PACKED = (384, 64, 512, 192, 96, 448, 352)
SHORT, TINY = (48, 80) * 8, (16, 24, 40) * 12
BIASED = partial(attention, SoftmaxKernel(m.Causal()))


def biased_of(lengths: Sequence[int]) -> Job:
    """Attention with a bias by distance in single documents of these lengths."""
    return sequence(
        *(BIASED(length, position=AlibiPosition(HEADS), repeats=max(1, 256 // length)) for length in lengths)
    )


def spans(*lengths: int) -> Job:
    """Attention with learned spans in single documents of these lengths."""
    kernel = AdaptiveSpanKernel(LearnedAttentionSpans(HEADS, 256, initial_share=0.4))
    return sequence(*(attention(kernel, length) for length in lengths))


def doubled(make_job: Callable[[], Job], *places: Place, steps: int = 2) -> Sweep:
    """The value in use, and its halves and doubles."""
    used = places[0].get()
    halves = [max(1, used >> step) for step in range(steps, 0, -1)]
    return Sweep(places, [*halves, used, *(used << step for step in range(1, steps + 1))], make_job)


def packed() -> Job:
    """Block-sparse attention in packed documents."""
    return attention(block_local("sparse"), *PACKED)


def transformer_xl() -> Job:
    """Attention with a vector for each distance."""
    return BIASED(1024, position=TransformerXLPosition(HEADS * WIDTH, HEADS))


SWEEPS: list[Sweep] = [
    doubled(
        lambda: attention(SoftmaxKernel(m.Causal(), path="blocked"), 2048, position=AlibiPosition(HEADS)),
        Place(toeplitz_attention, "BLOCK"),
    ),
    doubled(
        lambda: attention(SoftmaxKernel(m.Causal(), path="blocked"), 1024, position=ShawPosition(WIDTH)),
        Place(band, "BLOCK"),
    ),
    doubled(
        lambda: attention(SoftmaxKernel(path="blocked"), 1024, position=DistanceAwarePosition(HEADS)),
        Place(softmax_forms, "BLOCK"),
        Place(softmax_kernel, "BLOCK"),
    ),
    doubled(
        lambda: attention(block_local("sparse"), 2048, values=WIDTH // 2),
        Place(attention_with_lse, "BLOCK"),
    ),
    doubled(transformer_xl, Place(distance_vector_attention, "MAX_BLOCK_QUERIES")),
    doubled(transformer_xl, Place(distance_vector_attention, "SCORES_PER_THREAD")),
    doubled(
        lambda: attention(
            SoftmaxKernel(m.Causal(), dropout=0.1), 1024, position=TransformerXLPosition(HEADS * WIDTH, HEADS)
        ),
        Place(distance_vector_attention, "BLOCK"),
    ),
    doubled(channel_decays, Place(matrix_recurrence, "MIN_CHUNK")),
    doubled(lambda: attention(block_local("sparse"), 4096), Place(block_sparse_attention, "SCORES_PER_STEP")),
    doubled(
        lambda: attention(block_local("blocked"), 2048, position=AlibiPosition(HEADS)),
        Place(tiled_attention, "SCORES_PER_PIECE"),
    ),
    doubled(packed, Place(sparse_plan, "BLOCK"), steps=1),
    doubled(packed, Place(sparse_plan, "PAIRS_PER_MASK")),
    Sweep([Place(block_cover, "COARSENING")], (4, 8, 16), packed),
    Sweep([Place(block_cover, "MAX_RUNS")], (1, 2, 4), packed),
    Sweep([Place(block_cover, "MAX_PADDING_SHARE")], (1 / 16, 1 / 8, 1 / 4), packed),
    Sweep([Place(sparse_plan, "CHOSEN")], (3 / 4, 7 / 8, 1.0), packed),
    doubled(
        lambda: sequence(*(attention(SoftmaxKernel(m.Window(64)), n // 2, n // 2) for n in (256, 512, 1024))),
        Place(softmax_kernel, "MIN_PAIRS_FOR_PLAN"),
    ),
    doubled(lambda: sequence(*map(rows_with_roles, (384, 512, 768, 1024))), Place(sparse_plan, "MIN_ROW_PLAN_PAIRS")),
    doubled(
        lambda: sequence(convolution(1, 2048, 768), convolution(32, 64, 128), mixtures(1, 2048, 256)),
        Place(device_reads, "BLOCK_ELEMENTS"),
    ),
    doubled(lambda: sequence(scan(64, 32), scan(8, 256)), Place(selective_scan, "SCAN_ELEMENTS")),
    doubled(
        lambda: sequence(*(BIASED(*lengths, position=AlibiPosition(HEADS)) for lengths in (TINY, SHORT, PACKED))),
        Place(softmax_forms, "MIN_DOCUMENT_LENGTH"),
        Place(softmax_kernel, "MIN_DOCUMENT_LENGTH"),
    ),
    doubled(lambda: biased_of((64, 96, 128, 192, 256)), Place(softmax_kernel, "MAX_REFERENCE_PAIRS")),
    doubled(lambda: biased_of((4, 8, 16, 32, 64)), Place(softmax_kernel, "MAX_REFERENCE_QUERIES")),
    doubled(lambda: spans(4, 8, 16, 32, 64), Place(adaptive_span_kernel, "MAX_REFERENCE_QUERIES")),
    doubled(lambda: spans(1024), Place(adaptive_span_kernel, "BAND_ROUNDING")),
    doubled(small_batches, Place(sinkhorn_attention, "PAIRS_PER_THREAD")),
    doubled(
        lambda: attention(LSHKernel(num_buckets=32, chunk_length=64, num_hashes=2), 2048),
        Place(chunk_gather_attention, "PAIRS_PER_CALL", "cpu"),
    ),
    doubled(search, Place(top_products, "PRODUCTS_PER_BLOCK", "cpu")),
    doubled(search, Place(top_products, "ROWS")),
    doubled(lambda: losses(2048, 4096, 8192, 16384), Place(head, "MIN_CHUNKED_CLASSES")),
    doubled(lambda: losses(16384), Place(head, "TOKENS_PER_CHUNK"), steps=1),
]
