"""The base class of all models: what `forward` trains, loss and score, the state between batches, saving."""

import functools
import hashlib
import threading
from abc import ABC
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Self, final
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn
from typing_extensions import TypeVar

from manyformer.base.errors import UserError
from manyformer.models.embedding import check_length
from manyformer.models.head import BatchLoss, BatchScore, OutputHead
from manyformer.models.model_files import (
    GENERATION_FILE,
    GenerationSettings,
    ModelSpec,
    copy_tokenizers,
    refuse_changed_modules,
    replacement_folder,
    write_parts,
)
from manyformer.models.transformers_call import KEYWORDS, NO_KEYWORDS, TheirKeywords, call_as_transformers
from manyformer.nn.batches import Batch, to_device
from manyformer.nn.core import LayerOutput, RecordModule, State, tree_map
from manyformer.nn.runtime.module_places import check_shared, share_again, shared_tensors
from manyformer.nn.runtime.torch_internals import has_autocast, is_recorded

B = TypeVar("B", bound=Batch, default=Any)
"""The batch record of a model."""


class ModelOutput(NamedTuple):
    """The result of a model's `forward`; `loss` holds auxiliary losses only, with `labels=` that of the task too."""

    logits: Float[Tensor, "b l v"]
    state: State = None
    loss: Tensor | float = 0.0


def _also_of_batches(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A model's `forward`, which gives the loss or the score of a batch where it gets one in place of inputs."""

    @functools.wraps(forward)
    def forward_of_either(self: "Model", *inputs: Any, **options: Any) -> Any:
        # no tensor counts its targets
        if inputs and hasattr(inputs[0], "target_count"):
            return self.loss_or_score(*inputs, **options)
        if self.is_sharded:
            check_shared(self)
        if options and self.call_form is not None and any(name in KEYWORDS for name in options):
            return call_as_transformers(self, forward, self.call_form, inputs, options)
        output = forward(self, *inputs, **options)
        if is_recorded():
            return _recorded_output(output)
        return output

    return forward_of_either


def _recorded_output(output: Any) -> Any:
    """What a graph of another engine returns of an output."""
    if torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
        # what it records are tensors alone: no state, and no auxiliary loss that is a number
        return tuple(part for part in output if isinstance(part, Tensor))
    # graphs have no outputs that are numbers of Python
    tensors = (part if not isinstance(part, float) else output.logits.new_full((), part) for part in output)
    return type(output)(*tensors)


class Model(RecordModule, ABC, Generic[B]):
    """The base class of models; a recipe sets `spec`, which is all that a checkpoint needs besides the weights.

    A subclass defines `forward` for its inputs, and `head_inputs` for the loss and the score of its `head`, or `loss`
    and `score` themselves. Given a batch in place of inputs, `model(batch)` is its loss in training and its score in
    evaluation: one call in each training step, which forward hooks, `torch.compile(model)` and wrappers therefore see.

    Models of texts also take keywords of Hugging Face's models (`call_form`): `attention_mask` in place of segments,
    `inputs_embeds` in place of tokens, and `labels`, with which the output has the loss.
    """

    spec: ModelSpec
    head: OutputHead
    max_length: int | None = None
    """The maximum sequence length; None for no limit."""
    divides_columns: ClassVar[bool] = False
    """Whether several processes may divide the columns of its rows."""
    column_span: Callable[[int], tuple[int, int]] | None = None
    """The first column, and the one after the last, that this process computes of rows of a length; None for all."""
    call_form: ClassVar[TheirKeywords | None] = NO_KEYWORDS
    """What `forward` takes of the keywords of Hugging Face's models; None for one that gets them as they are."""
    is_sharded: ClassVar[bool] = False
    """Whether torch's FSDP2 has divided the weights of the model."""
    allows_autocast: ClassVar[bool] = True
    """Whether a run may compute forward passes in a narrower dtype."""
    tokenizer: Any = None
    """The tokenizer saved with the model, or a pair of source and target tokenizer; None if none was saved."""
    generation: GenerationSettings | None = None
    """What begins and ends generated texts in a model of another library; None where the tokenizer says it."""
    labels: tuple[str, ...] | None = None
    """The names of the labels saved with the model, by class id; None if none were saved."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # torch's `fully_shard` makes a class for the model
        cls.is_sharded = any(base.__name__ == "FSDPModule" for base in cls.__mro__)
        if "forward" in cls.__dict__:
            cls.forward = _also_of_batches(cls.forward)  # type: ignore[method-assign]

    @_also_of_batches
    def forward(self, *inputs: Any, **options: Any) -> Any:
        """The output for inputs, which a subclass defines; of a batch, its loss or its score."""
        raise NotImplementedError(f"a {type(self).__name__} is given batches alone")

    def loss_or_score(self, batch: B, state: State = None, *, label_smoothing: float = 0.0) -> BatchLoss | BatchScore:
        """What `forward` computes of a batch: the loss while the model trains, otherwise the score."""
        if self.training:
            return self.loss(batch, label_smoothing=label_smoothing, state=state)
        return self.score(batch, state=state)

    def head_inputs(self, batch: B, state: State) -> tuple[LayerOutput, Tensor]:
        """The streams that `head` predicts the targets of the batch from, and these targets."""
        raise NotImplementedError(f"{type(self).__name__} defines neither head_inputs nor loss and score")

    def loss(self, batch: B, *, label_smoothing: float = 0.0, state: State = None) -> BatchLoss:
        """The training loss; `label_smoothing` spreads that fraction over all classes (Szegedy et al. 2016).

        A `state` is that of the rows which this batch continues; None for models that carry none.
        """
        (x, next_state, extra), targets = self.head_inputs(batch, state)
        # the head may read the logits in parts: those of all targets together are never needed
        loss = self.head.loss(x, targets, label_smoothing=label_smoothing)
        # the compiler of torch 2.11 cannot return tuples that `_replace` has made
        return BatchLoss(loss.total, loss.targets, extra, next_state)

    def score(self, batch: B, *, state: State = None) -> BatchScore:
        """The negative log-likelihood without smoothing, and the accuracy; to be called without gradients."""
        (x, next_state, _), targets = self.head_inputs(batch, state)
        # in chunks of tokens, so that validation needs no more memory than training
        score = self.head.score(x, targets)
        return BatchScore(score.nll, score.targets, score.correct, next_state, score.others)

    def own_columns(self, batch: B) -> B:
        """The batch without the targets of other processes' columns."""
        raise NotImplementedError(f"the columns of a {type(self).__name__} are not divided")

    def init_state(self, batch: int, *, capacity: int | None = None) -> State:
        """The decoding state before any token; None for a model that has none."""
        return None

    def layers_without_step(self) -> list[str]:
        """The names of the decoder's layers that decode by `forward`; empty for a model that generates nothing."""
        return []

    @property
    def carries_state(self) -> bool:
        """Whether the state is carried from batch to batch where the rows of the batches continue."""
        return False

    def save(self, path: str | Path, *, tokenizers_of: str | Path | None = None) -> None:
        """Write spec and weights to the folder `path`, without pickle; an existing folder is replaced atomically.

        `tokenizers_of` is the folder of a saved model whose tokenizers and labels are copied.

        Raises UserError for a model without a spec, such as one composed of other models, which no recipe can rebuild,
        and for one with adapters, pruning masks, parametrizations or quantized weights.
        """
        if not hasattr(self, "spec"):
            name = type(self).__name__
            raise UserError(f"this {name} was not built by a recipe, so it cannot be saved; save the models inside it")
        refuse_changed_modules(self, "saved")
        with replacement_folder(Path(path)) as draft:
            if tokenizers_of is not None:
                copy_tokenizers(Path(tokenizers_of), draft)
            self.write_files(draft)

    def write_files(self, folder: Path) -> None:
        """Write the files of the model into an existing folder, to which other processes may write concurrently."""
        write_parts(self, self.spec, folder)
        if self.generation is not None:
            self.generation.write(folder / GENERATION_FILE)

    def check_length(self, length: int) -> None:
        """Raise ValueError if a sequence of `length` tokens is longer than the model allows."""
        check_length(length, self.max_length)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:  # noqa: FBT001, FBT002
        # on another device, and from the meta device, torch gives each place a tensor of its own
        shared = shared_tensors(self)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        share_again(shared)
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:  # noqa: FBT001, FBT002
        """Load weights as any module does; with `assign`, also into a model that was built without memory."""
        shared = shared_tensors(self) if assign else []
        keys = super().load_state_dict(state_dict, strict=strict, assign=assign)
        share_again(shared)
        weight = next((weight for weight in self.parameters() if not weight.is_meta), None)
        if assign and weight is not None:
            # buffers that no state dict holds have a device and a dtype, and no value that means anything
            for module in self.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    if buffer.is_meta:
                        setattr(module, name, torch.zeros_like(buffer, device=weight.device, dtype=weight.dtype))
        return keys

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype of keys and values under the current autocast."""
        device_type = self.device.type
        if has_autocast(device_type) and torch.is_autocast_enabled(device_type):
            return torch.get_autocast_dtype(device_type)
        return next(self.parameters()).dtype


def model_name(model: nn.Module) -> str:
    """The recipe of a model, or the class of one that no recipe built."""
    if isinstance(model, Model) and hasattr(model, "spec"):
        return model.spec.recipe
    return type(model).__name__


def max_length_of(*parts: nn.Module) -> int | None:
    """The maximum length that all modules within `parts` allow; None for no limit."""
    modules = {module: getattr(module, "max_length", None) for part in parts for module in part.modules()}
    limits = {module: limit for module, limit in modules.items() if limit is not None}
    # the rows and the columns of a grid are fewer than its cells
    inside = {axis for module in limits for axis in module.modules() if axis is not module}
    return min((limit for module, limit in limits.items() if module not in inside), default=None)


@final
class CarriedState:
    """The state of all rows after the latest batch; None before the first batch, and for models without such a state.

    `rows_continue` states that row r of each batch continues row r of the previous batch.
    """

    def __init__(self, model: Model, *, rows_continue: bool) -> None:
        self.model = model
        self.enabled = rows_continue and model.carries_state
        self.rows = 0
        self.state: State = None

    def state_for(self, batch: Batch) -> State:
        """The state to continue from; an empty one if the number of rows differs from that of the previous batch."""
        if not self.enabled:
            return None
        if self.state is None or self.rows != len(batch[0]):
            # another number of rows is another arrangement of the data: no row continues
            self.rows = len(batch[0])
            self.state = self.model.init_state(self.rows)
        return self.state

    def score(self, batch: Batch) -> BatchScore:
        """The score of the next batch, moved to the device of the model, from the state of the batch before it."""
        result = self.model.score(to_device(batch, self.model.device), state=self.state_for(batch))
        self.update(result)
        return result

    def update(self, result: BatchLoss | BatchScore) -> None:
        """Store the state after the batch, of which the next batch gets no gradient."""
        self.state = tree_map(Tensor.detach, result.state)


def weights_fingerprint(model: Model) -> str:
    """A hash of the names, types, shapes and values of all weights."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        # names and shapes too: the bytes of two weights could be those of one
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
        digest.update(weight.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class _EvaluatedModel(NamedTuple):
    """The blocks of `eval_mode` that a model is in, and its mode before the first of them."""

    blocks: int
    training: bool


_evaluated: "WeakKeyDictionary[nn.Module, _EvaluatedModel]" = WeakKeyDictionary()
_evaluated_lock = threading.Lock()


@contextmanager
def eval_mode(model: object) -> Iterator[None]:
    """Put `model` into evaluation mode inside the block and restore its mode afterwards; no effect on other objects.

    Of blocks that overlap, in several threads, the last one to end restores the mode."""
    if not isinstance(model, nn.Module):
        yield
        return
    with _evaluated_lock:
        entered = _evaluated.get(model, _EvaluatedModel(0, model.training))
        _evaluated[model] = entered._replace(blocks=entered.blocks + 1)
        model.eval()
    try:
        yield
    finally:
        with _evaluated_lock:
            entered = _evaluated[model]
            if entered.blocks > 1:
                _evaluated[model] = entered._replace(blocks=entered.blocks - 1)
            else:
                del _evaluated[model]
                # only the mode of the whole is restored: parts with a mode of their own keep it by overriding `train`
                model.train(entered.training)
