"""The task of describing images by texts."""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, final

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Int, UInt8
from numpy.typing import NDArray
from torch import Tensor

from manyformer.models import EncoderDecoder, PatchEmbedding
from manyformer.models.scores import ScoreKind, bleu, chrf, exact_match
from manyformer.models.tasks.media_labels import image_tokens
from manyformer.models.tasks.requests import EvaluationRequest, EvaluationResult, ImagePass, ImageTokenizer
from manyformer.models.tasks.task import LIKELIHOOD_SHARE, likelihood, token_scores
from manyformer.models.tasks.toy import SYMBOLS, Toy, ToyDraw
from manyformer.models.tasks.translation import EncoderDecoderTask, repeated_source
from manyformer.nn.batches import Seq2SeqBatch, to_device
from manyformer.nn.model_inputs import Inputs

PATCH_IDS = 32
"""The number of different patches that stand for token ids in contracts and measurements."""


@final
class Captioning(EncoderDecoderTask):
    """Writes a text for an image; where a source is token ids, each stands for a patch of the image."""

    name = "captioning"
    title = "captioning of images"
    data_forms: Mapping[str, str] = {"modalities": "captions"}
    reasons: Mapping[str, str] = {
        "source-padding": "all images have one size, so a source has no padding",
        "packing": "an image is not part of a row",
    }
    score_kinds: Mapping[str, ScoreKind] = {"bleu": ScoreKind(), "chrf": ScoreKind(), "exact": ScoreKind("%")}
    generates = "text"
    command = "caption"
    argument = "IMAGES"

    def token_ids(self, model: EncoderDecoder) -> int:
        return model.embed_target.vocab

    def source(self, model: EncoderDecoder[PatchEmbedding], inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """An image of the patches of the tokens that are no padding, repeated until it is full, in their segment."""
        embed = model.embed_source
        ids, segments = repeated_source(inputs, embed.tokens)
        return _image_of_ids(embed, ids), segments

    def toy(self, model: EncoderDecoder, draw: ToyDraw) -> Toy:
        """The caption names the first patches in reverse order."""
        caption = draw.period.flip(1)
        target = torch.cat([torch.ones_like(caption[:, :1]), caption[:, :-1]], dim=1)
        images, _ = self.source(model, Inputs(target, source=draw.period))
        return Toy(Seq2SeqBatch(images, target, caption), math.log(SYMBOLS))

    def evaluate(self, request: EvaluationRequest[EncoderDecoder]) -> EvaluationResult:
        """BLEU, chrF and exact matches of captions by beam search; perplexity and accuracy of references."""
        sums = likelihood(request, final_progress=LIKELIHOOD_SHARE)
        assert request.batches is not None
        references = [example.target for example in request.examples]
        settings = request.settings
        texts = list[str]()
        for batch in request.batches:
            moved: Any = to_device(batch, request.model.device)
            texts += request.answer_sources(moved.source, moved.source_segments)
            request.on_progress(LIKELIHOOD_SHARE + (1 - LIKELIHOOD_SHARE) * len(texts) / len(references))
        scores = [
            bleu(texts, references, tokenize=settings.tokenize, lowercase=settings.lowercase),
            chrf(texts, references),
            exact_match(texts, references),
            *token_scores(sums),
        ]
        return EvaluationResult(scores, f"{len(texts):,} captions, beam {settings.beam}")

    def image_pass(
        self, model: EncoderDecoder[PatchEmbedding], image: NDArray[np.uint8], tokenizer: ImageTokenizer | None
    ) -> ImagePass:
        """The pass of the encoder over an image."""
        return image_tokens(model.embed_source, image, model.device, model.encode)


@lru_cache(maxsize=16)
def _patches(values: int, device: torch.device) -> UInt8[Tensor, "ids values"]:
    """A patch for each token id, the same in every process."""
    generator = torch.Generator().manual_seed(PATCH_IDS)
    with torch.inference_mode(False):  # noqa: FBT003 - torch.compile takes no keyword
        # drawn on the CPU, whose numbers are the same on every machine
        return torch.randint(256, (PATCH_IDS, values), generator=generator, dtype=torch.uint8, device="cpu").to(device)


def _image_of_ids(embed: PatchEmbedding, ids: Int[Tensor, "b p"]) -> UInt8[Tensor, "b height width channels"]:
    height, _, channels = embed.shape
    patches = _patches(embed.patch**2 * channels, ids.device)[ids % PATCH_IDS]
    images: Any = rearrange(
        patches, "b (h w) (p q c) -> b (h p) (w q) c", h=height // embed.patch, p=embed.patch, q=embed.patch
    )
    image: Tensor = images
    return image


CAPTIONING = Captioning()
