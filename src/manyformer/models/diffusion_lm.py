"""Language models by masked diffusion: an encoder predicts the hidden tokens of a text, whole or block by block."""

from abc import abstractmethod
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.base.errors import UserError
from manyformer.models.embedding import ModelState, TokenEmbedding, check_length, empty_tail, positions_of
from manyformer.models.encoder_model import EncoderModel
from manyformer.models.head import BatchLoss, BatchScore, ClassHead, apply_head, count_targets
from manyformer.models.model import ModelOutput
from manyformer.models.noise import Hidden, NoiseSchedule, Units, hide_counts
from manyformer.nn.batches import IGNORE_INDEX, NoisedBatch
from manyformer.nn.core import Context, Layer, LayerOutput, State, TokenPositions, WatchFn, apply_layer, no_watch
from manyformer.nn.kernels.kernel import named_kernels
from manyformer.nn.masks.block_causal import CLEAN_ROLE, NOISY_ROLE, BlockCausal


class HiddenTokens(NamedTuple):
    """What a pass over a noised batch has computed: `token_logits` of all its tokens, and which of them were hidden."""

    logits: Float[Tensor, "b l v"]
    targets: Int[Tensor, "b l"]
    hidden: Hidden
    extra: Tensor | float

    def weighted_nats(self) -> Float[Tensor, "b l"]:
        """The losses of all tokens, each with its weight, which is 0 unless it is hidden."""
        # of all tokens, since a GPU that is to find the hidden ones makes the host wait for their number
        logits = self.logits.to(torch.promote_types(self.logits.dtype, torch.float32)).flatten(0, 1)
        losses = F.cross_entropy(logits, self.targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
        return losses.view_as(self.targets) * self.hidden.weights.to(losses.dtype)


class DiffusionLM(EncoderModel[NoisedBatch]):
    """A model of text by masked diffusion: `logits[:, i]` are those of token i itself, read at a hidden token.

    Some tokens become `mask_token`, and the model is trained to predict them from the others, without being told how
    many are hidden. Training hides them by the `schedule`; the score is the bound by counts, which has no schedule. The
    logits of a visible token mean nothing, and `token_logits` makes distributions of those of a hidden one: the two
    halves of SUBS (Sahoo et al. 2024, arXiv:2406.07524, section 3.2.3). Raises UserError for a `mask_token` beyond the
    vocabulary."""

    def __init__(
        self, embed: TokenEmbedding, body: Layer, head: ClassHead, schedule: NoiseSchedule, *, mask_token: int
    ) -> None:
        super().__init__(embed, body, head)
        if not 0 <= mask_token < embed.vocab:
            raise UserError(f"mask_token ({mask_token}) must be one of the tokens 0 to {embed.vocab - 1}")
        self.schedule = schedule
        self.mask_token = mask_token

    def token_logits(self, logits: Float[Tensor, "*b v"]) -> Float[Tensor, "*b v"]:
        """The logits without that of the mask token, which stands for no token: its probability is 0."""
        is_mask = torch.arange(logits.shape[-1], device=logits.device) == self.mask_token
        return logits.masked_fill(is_mask, -torch.inf)

    @property
    @abstractmethod
    def unit_size(self) -> int | None:
        """The number of tokens that share a noise level; None for all of a document."""

    @abstractmethod
    def encode_noised(
        self, noised: Int[Tensor, "b l"], clean: Int[Tensor, "b l"], positions: TokenPositions
    ) -> LayerOutput:
        """The stream of the noised tokens (b, l, d), from which the hidden ones are predicted."""

    def loss(self, batch: NoisedBatch, *, label_smoothing: float = 0.0, state: State = None) -> BatchLoss:
        """The weighted loss of the hidden tokens, over all targets. Raises UserError for label smoothing."""
        if label_smoothing:
            raise UserError(
                f"loss.label_smoothing ({label_smoothing}) would make the loss of a diffusion no bound; leave it 0"
            )
        passed = self.predict_hidden(batch, by_counts=False)
        return BatchLoss(passed.weighted_nats().sum(), count_targets(batch.targets), passed.extra)

    def score(self, batch: NoisedBatch, *, state: State = None) -> BatchScore:
        """The bound on the negative log-likelihood in nats, by counts, and how many hidden tokens were right.

        `others` has the number of `hidden` tokens, of which `correct` are a part."""
        passed = self.predict_hidden(batch, by_counts=True)
        is_hidden = passed.hidden.is_hidden
        correct = ((passed.logits.argmax(-1) == passed.targets) & is_hidden).sum()
        nats = passed.weighted_nats().sum().cpu().double()
        return BatchScore(nats, count_targets(batch.targets), correct, None, {"hidden": is_hidden.sum()})

    def predict_hidden(self, batch: NoisedBatch, *, by_counts: bool) -> HiddenTokens:
        """Hide tokens of a batch, by counts or by the schedule of training, and compute the logits of all tokens."""
        positions = self._token_positions(batch.tokens, batch.segments, layout=batch.layout)
        # a mask token in the text itself is hidden for everybody, and nobody knows what it stands for
        is_mask = (batch.tokens == self.mask_token) | (batch.targets == self.mask_token)
        is_target = (batch.targets != IGNORE_INDEX) & ~is_mask
        units = Units(unit_starts(positions, self.unit_size), is_target)
        if by_counts:
            hidden = hide_counts(batch.noise, units)
        else:
            hidden = self.schedule.hide(batch.noise, units)
        noised = batch.tokens.masked_fill(hidden.is_hidden, self.mask_token)
        stream = self.encode_noised(noised, batch.tokens, positions)
        logits = self.token_logits(apply_head(self.head, stream.y))
        return HiddenTokens(logits, torch.where(is_target, batch.targets, IGNORE_INDEX), hidden, stream.loss)


def unit_starts(positions: TokenPositions, size: int | None) -> Int[Tensor, "b l"]:
    """The column of the first token of each token's document, or of its block of `size` positions in the document."""
    place = positions.position_ids if size is None else positions.position_ids % size
    columns = torch.arange(place.shape[1], device=place.device)
    # padding has a place of its own
    return (columns - place).clamp(min=0)


@final
class MaskedDiffusionLM(DiffusionLM):
    """A masked diffusion over whole documents (Sahoo et al. 2024, arXiv:2406.07524: MDLM; Nie et al. 2025: LLaDA).

    Raises UserError for a body whose attention is causal: a hidden token is predicted from both sides."""

    def __init__(
        self, embed: TokenEmbedding, body: Layer, head: ClassHead, schedule: NoiseSchedule, *, mask_token: int
    ) -> None:
        super().__init__(embed, body, head, schedule, mask_token=mask_token)
        refuse_causal_attention(body)

    def forward(
        self,
        tokens: Int[Tensor, "b l"],
        segments: Int[Tensor, "b l"] | None = None,
        *,
        watch: WatchFn = no_watch,
        inputs_embeds: Float[Tensor, "b l d"] | None = None,
    ) -> ModelOutput:
        positions = self._token_positions(tokens, segments)
        hidden = self._encode(tokens if inputs_embeds is None else inputs_embeds, positions, watch)
        return ModelOutput(apply_head(self.head, hidden.y), None, hidden.loss)

    @property
    def unit_size(self) -> int | None:
        return None

    def encode_noised(
        self, noised: Int[Tensor, "b l"], clean: Int[Tensor, "b l"], positions: TokenPositions
    ) -> LayerOutput:
        return self._encode(noised, positions, no_watch)


def refuse_causal_attention(body: nn.Module) -> None:
    """Raise UserError for attention that sees no later token."""
    for name, kernel in named_kernels(body).items():
        mask = kernel.cache_mask
        if kernel.recurrent or (mask is not None and mask.causal):
            raise UserError(
                f"the attention of {name} is causal ({mask or type(kernel).__name__}), and a masked diffusion predicts "
                "a hidden token from both sides: take the layers of an encoder, such as SoftmaxKernel() without a mask"
            )


@final
class BlockDiffusionLM(DiffusionLM):
    """A masked diffusion within each block of a text, given the blocks before it (Arriola et al. 2025: BD3-LM).

    arXiv:2503.09573, section 3: -log p(x) is at most the sum of the bounds of the blocks. A block of 1 is a model of
    each next token, in another order of computation. `forward` computes a text as decoding does: with a state from
    `init_state` the tokens continue what it holds, and must begin at a block. Raises UserError unless the attention of
    all layers has the mask `BlockCausal(block)`."""

    def __init__(
        self,
        embed: TokenEmbedding,
        body: Layer,
        head: ClassHead,
        schedule: NoiseSchedule,
        *,
        mask_token: int,
        block: int,
    ) -> None:
        super().__init__(embed, body, head, schedule, mask_token=mask_token)
        self.block = block
        mask = BlockCausal(block)
        for name, kernel in named_kernels(body).items():
            if kernel.recurrent or kernel.cache_mask != mask:
                raise UserError(
                    f"the attention of {name} has the mask {kernel.cache_mask}, and a diffusion by blocks of {block} "
                    f"needs {mask}"
                )

    def forward(
        self,
        tokens: Int[Tensor, "b l"],
        segments: Int[Tensor, "b l"] | None = None,
        state: ModelState | None = None,
        *,
        watch: WatchFn = no_watch,
        inputs_embeds: Float[Tensor, "b l d"] | None = None,
    ) -> ModelOutput:
        positions, tail = positions_of(tokens, segments, None if state is None else state.tail)
        check_length(tokens.shape[1], self.max_length)
        x = self.embed(tokens if inputs_embeds is None else inputs_embeds, positions)
        y, body, loss = apply_layer(self.body, x, Context(positions, watch=watch), state and state.body)
        return ModelOutput(apply_head(self.head, y), None if tail is None else ModelState(body, tail), loss)

    def init_state(self, batch: int, *, capacity: int | None = None) -> ModelState:
        """The state before any token, which holds keys and values of finished blocks."""
        device = self.device
        body = self.body.init_state(batch, capacity=capacity, device=device, dtype=self.state_dtype)
        return ModelState(body, empty_tail(batch, device))

    @property
    def unit_size(self) -> int | None:
        return self.block

    def encode_noised(
        self, noised: Int[Tensor, "b l"], clean: Int[Tensor, "b l"], positions: TokenPositions
    ) -> LayerOutput:
        # one pass over both (section 3.2): the clean half gives each block the finished ones before it
        both = twice(positions)
        hidden = self._encode(torch.cat([noised, clean], dim=1), both, no_watch)
        return LayerOutput(hidden.y[:, : noised.shape[1]], None, hidden.loss)


def twice(positions: TokenPositions) -> TokenPositions:
    """The positions of a noisy copy of a text and of the text itself, side by side in one row."""
    roles = [torch.full_like(positions.position_ids, role) for role in (NOISY_ROLE, CLEAN_ROLE)]
    position_ids = torch.cat([positions.position_ids, positions.position_ids], dim=1)
    segment_ids = torch.cat([positions.segment_ids, positions.segment_ids], dim=1)
    return TokenPositions(position_ids, segment_ids, roles=torch.cat(roles, dim=1))
