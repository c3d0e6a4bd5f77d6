"""Training steps on the `meta` device, which has shapes alone: rules for what torch leaves undefined there.

Attention takes the kernel that a CPU would take, a mask selects a stated share of its elements, and autocast to a
narrower dtype is done by hand, because torch has none for this device.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from manyformer.torch_internals import TorchDispatchMode, tree_map

_ATEN = torch.ops.aten
_INDEXED = {_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default, _ATEN._index_put_impl_.default}
_FUSED = _ATEN._scaled_dot_product_flash_attention_for_cpu.default


@final
class ShapeRules:
    """Context manager in which a training step runs on the `meta` device.

    Boolean masks select the share `selected` of their elements, whose number is unknown without data. Products run in
    `autocast`, None for the dtype of the weights.
    """

    def __init__(self, *, selected: float = 1.0, autocast: torch.dtype | None = None) -> None:
        self.selected = selected
        self.autocast = autocast

    def __enter__(self) -> Self:
        self._modes = ExitStack()
        if self.autocast is not None:
            self._modes.enter_context(_Autocast(self.autocast))
        self._modes.enter_context(_fused_attention())
        self._modes.enter_context(_Selections(self.selected))
        return self

    def __exit__(self, *details: Any) -> None:
        self._modes.close()


_NARROW = {
    *(F.linear, F.conv1d, F.conv2d, F.scaled_dot_product_attention),
    *(torch.matmul, torch.bmm, torch.einsum, Tensor.matmul, Tensor.__matmul__, Tensor.bmm),
}
_WIDE = {F.layer_norm, F.rms_norm, F.softmax, F.log_softmax, F.cross_entropy, torch.softmax, Tensor.softmax}


@final
class _Autocast(TorchFunctionMode):
    """Autocast by the lists of torch for GPUs: products in the narrow dtype, sums and norms in float32.

    The narrow copy of a weight lives as long as the mode, as torch's cache of them does.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self._weights: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _NARROW or func in _WIDE:
            cast = self._narrow if func in _NARROW else _widen
            args, kwargs = tree_map(cast, (tuple(args), kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _narrow(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            return value
        if not isinstance(value, nn.Parameter):
            return value.to(self.dtype)
        if id(value) not in self._weights:
            self._weights[id(value)] = value, value.to(self.dtype)
        return self._weights[id(value)][1]


def _widen(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.float()
    return value


_SDPA = F.scaled_dot_product_attention


@contextmanager
def _fused_attention() -> Iterator[None]:
    """Computes attention as torch's fused kernel for CPUs where a CPU would; on `meta`, torch forms all weights.

    The function itself is replaced, because function modes do not apply to what layers compute again in a backward
    pass, such as reversible ones.
    """
    F.scaled_dot_product_attention = _attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = _SDPA


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - the signature is torch's
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001, FBT002
) -> Tensor:
    q = query
    k = key
    v = value
    has_bias_gradient = attn_mask is not None and attn_mask.requires_grad
    if q.device.type != "meta" or q.ndim != 4 or dropout_p or has_bias_gradient or q.shape[-1] != v.shape[-1]:
        options: dict[str, Any] = {
            "dropout_p": dropout_p,
            "is_causal": is_causal,
            "scale": scale,
            "enable_gqa": enable_gqa,
        }
        return _SDPA(q, k, v, attn_mask, **options)
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    y: Tensor = _FUSED(q, k, v, 0.0, is_causal, attn_mask=None, scale=scale)[0]
    return y


@final
class _Selections(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets boolean masks select a share of all elements."""

    def __init__(self, share: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.share = share

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ATEN.nonzero.default and args[0].device.type == "meta":
            return self._indices(args[0])
        if func is _ATEN.masked_select.default and args[0].device.type == "meta":
            size = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()  # type: ignore[no-untyped-call]
            return args[0].new_empty(round(self.share * size))
        if func in _INDEXED and args[0].device.type == "meta":
            args = (args[0], [part for index in args[1] for part in self._numbers(index)], *args[2:])
        return func(*args, **(kwargs or {}))

    def _numbers(self, index: Tensor | None) -> list[Tensor | None]:
        """A mask as one index for each of its axes; other indices as they are."""
        if index is None or index.dtype != torch.bool:
            return [index]
        return list(self._indices(index).unbind(-1))

    def _indices(self, mask: Tensor) -> Tensor:
        return torch.empty(round(self.share * mask.numel()), mask.ndim, dtype=torch.long, device="meta")
