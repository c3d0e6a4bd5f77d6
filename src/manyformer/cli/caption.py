"""`manyformer caption`: describe images with a trained captioner."""

from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from manyformer.cli.app import USE, command
from manyformer.cli.console import json_line, print_note, print_text
from manyformer.cli.decoding_arguments import decoding_option
from manyformer.cli.model_arguments import model_folder, resolve_device
from manyformer.cli.shared_options import DeviceOption, JsonLinesOption, RunFolderArgument
from manyformer.decoding_options import StepPath

if TYPE_CHECKING:
    from manyformer.evaluate.captions import ImageCaption


@command(
    USE,
    "manyformer caption runs/modalities-captions picture.png",
    "manyformer caption runs/modalities-captions pictures/ --beam 8 --n-best 3",
    "manyformer caption runs/modalities-captions pictures/ --json > captions.jsonl",
)
def caption(
    run: RunFolderArgument,
    images: Annotated[str, Argument(help="An image file, a folder of image files, or an archive (.npz) of images.")],
    *,
    n_best: Annotated[int, Option(min=1, help="Print the N best captions of the beam, with their scores.")] = 1,
    beam: Annotated[int, decoding_option("beam")] = 4,
    length_penalty: Annotated[float, decoding_option("length_penalty")] = 0.6,
    max_new: Annotated[int | None, decoding_option("max_new")] = None,
    step_path: Annotated[StepPath | None, decoding_option("step_path")] = None,
    device: DeviceOption = None,
    as_json: JsonLinesOption = False,
) -> None:
    """Write a caption for each image: a line with the file and what the model says about it.

    Square images of another size are resized to that of the model.
    """
    from manyformer.evaluate.captions import caption_images
    from manyformer.generate import decoding_from_options

    model_folder(run)
    decoding = decoding_from_options(
        beam=beam, length_penalty=length_penalty, best=n_best, max_new=max_new, step_path=step_path
    )
    for item in caption_images(run, images, decoding, device=resolve_device(device), log=print_note):
        print_text(_json_line(item) if as_json else _text(item, n_best))


def _json_line(item: "ImageCaption") -> str:
    captions = [{"text": caption.text, "score": caption.score} for caption in item.captions]
    return json_line({"input": item.location, "captions": captions})


def _text(item: "ImageCaption", n_best: int) -> str:
    if n_best == 1:
        return f"{item.location}\t{item.captions[0].text}"
    return "\n".join(f"{item.location}\t{caption.score:.4f}\t{caption.text}" for caption in item.captions)
