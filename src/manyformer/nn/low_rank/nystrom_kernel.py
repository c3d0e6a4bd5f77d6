"""Nystroem attention: the softmax matrix rebuilt from a few landmarks, with a convolution over values."""

import math
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from manyformer.nn.core import ContiguousLayout, LayerOutput, PackedLayout, TokenPositions, no_watch
from manyformer.nn.kernels.kernel import Kernel, KernelCall
from manyformer.nn.ops import softmax_attention as ops
from manyformer.nn.ops.document_rows import grid_by_run
from manyformer.nn.runtime.devices import wide_dtype
from manyformer.nn.runtime.head_selection import HeadSelection, PerHeadTensors
from manyformer.nn.runtime.torch_internals import autocast_disabled


@final
class NystromKernel(Kernel, PerHeadTensors):
    """softmax(q k'^T) pinv(softmax(q' k'^T)) softmax(q' k^T) v, for landmarks q' and k' (Xiong et al. 2021, section 3).

    Nystroemformer, arXiv:2102.03902. The landmarks of a document are the means of `landmarks` runs of neighbouring
    tokens, whose lengths differ by one at most; a document of no more tokens has plain softmax attention. The inverse
    is `iterations` steps of equation 11, whose start divides each matrix by its own largest column sum, where the
    released code takes the largest of a batch. `convolution` tokens of the values are added with learned weights for
    each head, as in the released code; None for no convolution. Landmarks mix all tokens: it is for encoders. Raises
    ValueError for an even convolution, and for queries that are not the keys' tokens.
    """

    supports: frozenset[str] = frozenset()
    mixes_keys = True
    head_axes = (("weight", -2),)

    def __init__(self, heads: int, landmarks: int = 64, *, iterations: int = 6, convolution: int | None = 33) -> None:
        super().__init__()
        if landmarks < 1 or iterations < 1:
            raise ValueError(f"NystromKernel: landmarks ({landmarks}) and iterations ({iterations}) must be at least 1")
        if convolution is not None and convolution % 2 == 0:
            raise ValueError(f"NystromKernel: convolution ({convolution}) must be an odd number of tokens")
        self.landmarks = landmarks
        self.iterations = iterations
        self.weight: nn.Parameter | None = None
        if convolution is not None:
            limit = convolution**-0.5
            self.weight = nn.Parameter(torch.empty(heads, convolution).uniform_(-limit, limit))

    def keep_heads(self, selection: HeadSelection) -> None:
        if self.weight is not None:
            super().keep_heads(selection)

    def forward(self, call: KernelCall) -> LayerOutput:
        q = call.q
        k = call.k
        v = call.v
        key_positions = call.key_positions
        if q.shape[2] != k.shape[2]:
            raise ValueError(f"NystromKernel needs queries and keys of the same tokens, got {q.shape[2]}, {k.shape[2]}")
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        if isinstance(key_positions.layout, ContiguousLayout):
            if call.watch is not no_watch:
                call.watch(self, "weights", self._landmark_weights(q, k))
            return LayerOutput(self._attend(q, k, v, None), call.state)
        documents = grid_by_run(key_positions)
        q, k, v = (documents.scatter(x) for x in (q, k, v))
        y = self._attend(q, k, v, documents.present.sum(-1), has_short=self._has_short(key_positions))
        return LayerOutput(documents.gather(y, call.q.shape[2]), call.state)

    def explain(self, call: KernelCall) -> str:
        if call.k.shape[2] <= self.landmarks:
            return f"softmax: no document has more than {self.landmarks} tokens, the landmarks"
        return f"landmarks: {self.landmarks} in place of {call.k.shape[2]} keys, {self.iterations} steps of inversion"

    def extra_repr(self) -> str:
        convolution = None
        if self.weight is not None:
            convolution = self.weight.shape[1]
        return f"landmarks={self.landmarks}, iterations={self.iterations}, convolution={convolution}"

    def _attend(
        self,
        q: Float[Tensor, "b h l e"],
        k: Float[Tensor, "b h l e"],
        v: Float[Tensor, "b h l f"],
        lengths: Int[Tensor, " b"] | None,
        *,
        has_short: bool | None = None,
    ) -> Float[Tensor, "b h l f"]:
        """The outputs of rows of one document each, of `lengths` tokens; all if None.

        `has_short` says whether one has no more tokens than there are landmarks; None where that is not known."""
        length = q.shape[2]
        scale = 1 / math.sqrt(q.shape[-1])
        short = min(q.shape[2], self.landmarks)
        # without reading values where there is nothing to read: a device would wait, and costs are counted without any
        if lengths is None:
            has_short = length == short
        elif has_short is None:
            has_short = bool((lengths <= self.landmarks).any())
        has_padding = lengths is not None
        if lengths is None:
            lengths = torch.full(q.shape[:1], length, device=q.device)
        if length == short:
            y = torch.zeros_like(v)
        else:
            y = self._approximate(q, k, v, lengths, scale, has_padding=has_padding)
        if has_short:
            q_short, k_short, v_short = (x[:, :, :short] for x in (q, k, v))
            mask = (torch.arange(short, device=q.device) < lengths[:, None])[:, None, None].expand(-1, -1, short, -1)
            # rows of few tokens would have empty landmarks: they are computed exactly and taken instead
            exact = ops.fused_attention(q_short, k_short, v_short, mask, causal=False, scale=scale)
            is_short = (lengths <= self.landmarks)[:, None, None, None]
            y = torch.where(is_short, F.pad(exact, (0, 0, 0, length - short)), y)
        if self.weight is None:
            return y
        size = self.weight.shape[1]
        weight = self.weight.to(v.dtype)[:, None, :, None]
        return y + F.conv2d(v, weight, padding=(size // 2, 0), groups=v.shape[1])

    def _has_short(self, positions: TokenPositions) -> bool | None:
        """Whether a line of the grid has no more tokens than there are landmarks; None if no layout says it."""
        layout = positions.layout
        if not isinstance(layout, PackedLayout):
            return None
        # rows with fewer documents than others have lines without tokens
        has_empty_line = len(layout.documents) < len(positions.segment_ids) * max(layout.most_in_row, 1)
        return has_empty_line or min(stop - start for _, start, stop in layout.documents) <= self.landmarks

    def _approximate(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Int[Tensor, " b"], scale: float, *, has_padding: bool
    ) -> Float[Tensor, "b h l f"]:
        valid = torch.arange(q.shape[2], device=q.device) < lengths[:, None]
        shares = self._run_shares(valid, lengths).to(q.dtype)
        q_landmarks, k_landmarks = (shares[:, None] @ x for x in (q, k))
        mask = None
        if has_padding:
            mask = valid[:, None, None].expand(-1, -1, self.landmarks, -1)
        values = ops.fused_attention(q_landmarks, k, v, mask, causal=False, scale=scale)
        compute_dtype = torch.promote_types(q.dtype, torch.float32)
        with autocast_disabled(q.device):
            middle = (q_landmarks.to(compute_dtype) @ k_landmarks.mT.to(compute_dtype) * scale).softmax(-1)
            # from the right: all products are as small as the landmarks are few
            solved = iterative_pseudoinverse(middle, self.iterations) @ values.to(compute_dtype)
        outer = (q @ k_landmarks.mT * scale).softmax(-1, dtype=compute_dtype)
        return outer.to(v.dtype) @ solved.to(v.dtype)

    def _run_shares(self, valid: Bool[Tensor, "b l"], lengths: Int[Tensor, " b"]) -> Float[Tensor, "b m l"]:
        """The share of each token in the mean of each landmark, in the widest dtype of the device."""
        column = torch.arange(valid.shape[1], device=valid.device)
        # equal shares of a document's own length, so that padding changes nothing
        run = column * self.landmarks // lengths.clamp(min=1)[:, None]
        is_in_run = (run[:, None] == torch.arange(self.landmarks, device=run.device)[:, None]) & valid[:, None]
        return is_in_run.to(wide_dtype(valid.device)) / is_in_run.sum(-1, keepdim=True).clamp(min=1)

    def _landmark_weights(self, q: Tensor, k: Tensor) -> Float[Tensor, "b h l m"]:
        """The weights of the landmarks of each query in rows of one document, or of its keys where they are fewer."""
        scale = 1 / math.sqrt(q.shape[-1])
        length = q.shape[2]
        if length > self.landmarks:
            valid = torch.ones(len(q), length, dtype=torch.bool, device=q.device)
            k = self._run_shares(valid, valid.sum(-1)).to(k.dtype)[:, None] @ k
        return (q @ k.mT * scale).softmax(-1)


def iterative_pseudoinverse(matrix: Float[Tensor, "*b m m"], iterations: int) -> Float[Tensor, "*b m m"]:
    """The pseudoinverse of matrices with rows of sum 1, approximated by steps of third order (Razavi et al. 2014)."""
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    # rows sum to 1: dividing by the largest column sum makes the start small enough to converge
    inverse = matrix.mT / matrix.sum(-2).amax(-1)[..., None, None]
    for _ in range(iterations):
        product = matrix @ inverse
        inverse = 0.25 * inverse @ (13 * identity - product @ (15 * identity - product @ (7 * identity - product)))
    return inverse
