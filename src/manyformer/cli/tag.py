"""`manyformer tag`: label the words of sentences with dependency trees."""

from typing import Annotated

import typer

from manyformer.cli.app import USE, app, examples


@app.command(
    "tag",
    rich_help_panel=USE,
    epilog=examples(
        "manyformer tag runs/tag-relations parsed.conllu > labelled.conllu",
        "cat parsed.conllu | manyformer tag runs/tag-relations -",
    ),
)
def tag(
    run: Annotated[str, typer.Argument(help="The folder of a run.")],
    file: Annotated[str, typer.Argument(help="Sentences with their trees in CoNLL-U; '-' reads standard input.")],
    *,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU where there is one unless given.")] = None,
) -> None:
    """Label the words of a CoNLL-U file with a trained tagger, and print the file with the labels in their column.

    The trees (column 7) are read; existing labels are ignored.
    """
    from manyformer.cli.model_arguments import model_folder, resolve_device
    from manyformer.evaluate import tag as label

    model_folder(run)
    for sentence in label(run, file, device=resolve_device(device)):
        print("\n".join(sentence.lines), end="\n\n")
