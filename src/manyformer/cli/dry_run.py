"""The summary of a run's model for `--dry-run`."""

from manyformer.cli.console import format_count, print_result
from manyformer.config import RunConfig
from manyformer.model_summary import build_on_meta, count_parameters, forward_cost, module_rows
from manyformer.recipes import get_recipe
from manyformer.recipes.encoder_heads import HEAD, expected_head
from manyformer.train.optimizers import weight_decay_groups


def print_summary(run: RunConfig) -> None:
    """Print the model as comments, so that the output of `--dry-run` is still a run file."""
    recipe = get_recipe(run.recipe)
    expected = run.data.expected_keywords(set(recipe.signature.parameters) - set(run.model))
    head = expected_head(recipe.card.task.variant(run.data.kind)) if HEAD in recipe.signature.parameters else {}
    model = build_on_meta(run.recipe, {**head, **run.model, **expected.keywords})
    print_result()
    print_result(f"# {recipe.card.title}: {count_parameters(model):,} parameters ({expected.assumption})")
    for part in module_rows(model):
        if part.level < 2 and part.parameters:
            times = f" x {part.times}" if part.times > 1 else ""
            print_result(f"#   {'  ' * part.level}{part.name}{times} {part.kind}: {part.parameters:,}")
    decayed, undecayed = (sum(weight.numel() for weight in group) for group in weight_decay_groups(model))
    print_result(
        f"# weight decay: {decayed:,} parameters decay, {undecayed:,} do not (biases, norms, tables, positions)"
    )
    cost = forward_cost(model, expected.row_length)
    step = 3 * cost.flops * run.batch.tokens * run.batch.accumulate / expected.row_length
    print_result(f"# a step: {run.batch.tokens * run.batch.accumulate:,} tokens, about {format_count(step)}FLOP")
    print_result("# nothing was trained: this was --dry-run")
