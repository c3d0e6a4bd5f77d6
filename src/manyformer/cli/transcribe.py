"""`manyformer transcribe`: write what recordings say with a trained model."""

from typing import TYPE_CHECKING, Annotated

from typer import Argument

from manyformer.cli.app import USE, command
from manyformer.cli.console import print_text
from manyformer.cli.decoding_arguments import decoding_option
from manyformer.cli.model_arguments import model_folder, resolve_device
from manyformer.cli.shared_options import DeviceOption, JsonLinesOption, RunFolderArgument
from manyformer.files.json_text import json_text

if TYPE_CHECKING:
    from manyformer.evaluate.transcripts import Transcript


@command(
    USE,
    "manyformer transcribe runs/audio-digit-strings speech.wav",
    "manyformer transcribe runs/audio-digit-strings one.wav two.flac --beam 8",
    "manyformer transcribe runs/audio-digit-strings recordings/ --json > transcripts.jsonl",
)
def transcribe(
    run: RunFolderArgument,
    files: Annotated[list[str], Argument(help="Recordings: wav, flac, ogg or mp3 files, or folders of them.")],
    *,
    beam: Annotated[int, decoding_option("beam")] = 4,
    device: DeviceOption = None,
    as_json: JsonLinesOption = False,
) -> None:
    """Write down what recordings say: a line with the file and the text for each.

    Other sample rates than that of the run are converted.
    """
    from manyformer.evaluate.transcripts import transcribe_files

    model_folder(run)
    for item in transcribe_files(run, files, beam=beam, device=resolve_device(device)):
        print_text(_json_line(item) if as_json else f"{item.location}\t{item.text}")


def _json_line(item: "Transcript") -> str:
    record = {"input": item.location, "text": item.text, "log_probability": item.log_probability}
    return json_text(record)
