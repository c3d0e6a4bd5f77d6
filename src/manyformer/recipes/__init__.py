"""Published models as functions, one file for each paper; importing this package registers all of them."""

from manyformer.recipes.adaptive_span import adaptive_span
from manyformer.recipes.alibi import alibi
from manyformer.recipes.bahdanau import bahdanau
from manyformer.recipes.bert import bert
from manyformer.recipes.bigbird import bigbird, bigbird_etc, bigbird_lm, bigbird_seq2seq
from manyformer.recipes.blockwise import blockwise
from manyformer.recipes.calm import calm
from manyformer.recipes.collaborative import collaborative, collaborative_encoder
from manyformer.recipes.compose import compose
from manyformer.recipes.compose_images import compose_images
from manyformer.recipes.compressive_transformer import compressive_transformer
from manyformer.recipes.da_transformer import da_transformer
from manyformer.recipes.deep_char_lm import deep_char_lm
from manyformer.recipes.depth_adaptive import depth_adaptive_lm, depth_adaptive_transformer
from manyformer.recipes.early_exit import early_exit_lm, early_exit_seq2seq
from manyformer.recipes.etc import etc
from manyformer.recipes.fnet import fnet
from manyformer.recipes.gmlp import gmlp, gmlp_encoder
from manyformer.recipes.image_transformer import image_transformer, image_transformer_2d
from manyformer.recipes.linear_transformer import linear_transformer
from manyformer.recipes.linformer import linformer
from manyformer.recipes.longformer import longformer, longformer_lm
from manyformer.recipes.memorizing_transformer import memorizing_transformer
from manyformer.recipes.mlp_mixer import mlp_mixer
from manyformer.recipes.performer import performer, performer_encoder
from manyformer.recipes.reformer import reformer, reformer_encoder, reformer_strict
from manyformer.recipes.registry import RECIPES, Recipe, RecipeCard, build, get_recipe, recipe
from manyformer.recipes.rfa import rfa
from manyformer.recipes.roformer import roformer
from manyformer.recipes.routing_transformer import routing_transformer, routing_transformer_strict
from manyformer.recipes.shaw import shaw
from manyformer.recipes.sinkhorn_transformer import sinkhorn_encoder, sinkhorn_transformer
from manyformer.recipes.spalm import spalm
from manyformer.recipes.sparse_transformer import sparse_transformer
from manyformer.recipes.structural import structural
from manyformer.recipes.synthesizer import synthesizer
from manyformer.recipes.transformer import transformer
from manyformer.recipes.transformer_classifier import transformer_classifier
from manyformer.recipes.transformer_lm import transformer_lm
from manyformer.recipes.transformer_xl import transformer_xl
from manyformer.recipes.universal_transformer import (
    universal_transformer,
    universal_transformer_classifier,
    universal_transformer_lm,
)
from manyformer.recipes.vit import vit

__all__ = [
    "RECIPES",
    "Recipe",
    "RecipeCard",
    "adaptive_span",
    "alibi",
    "bahdanau",
    "bert",
    "bigbird",
    "bigbird_etc",
    "bigbird_lm",
    "bigbird_seq2seq",
    "blockwise",
    "build",
    "calm",
    "collaborative",
    "collaborative_encoder",
    "compose",
    "compose_images",
    "compressive_transformer",
    "da_transformer",
    "deep_char_lm",
    "depth_adaptive_lm",
    "depth_adaptive_transformer",
    "early_exit_lm",
    "early_exit_seq2seq",
    "etc",
    "fnet",
    "get_recipe",
    "gmlp",
    "gmlp_encoder",
    "image_transformer",
    "image_transformer_2d",
    "linear_transformer",
    "linformer",
    "longformer",
    "longformer_lm",
    "memorizing_transformer",
    "mlp_mixer",
    "performer",
    "performer_encoder",
    "recipe",
    "reformer",
    "reformer_encoder",
    "reformer_strict",
    "rfa",
    "roformer",
    "routing_transformer",
    "routing_transformer_strict",
    "shaw",
    "sinkhorn_encoder",
    "sinkhorn_transformer",
    "spalm",
    "sparse_transformer",
    "structural",
    "synthesizer",
    "transformer",
    "transformer_classifier",
    "transformer_lm",
    "transformer_xl",
    "universal_transformer",
    "universal_transformer_classifier",
    "universal_transformer_lm",
    "vit",
]
