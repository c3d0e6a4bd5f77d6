"""Exported folders on the Hugging Face hub."""

from pathlib import Path

from manyformer.errors import UserError
from manyformer.files.unfinished_folder import MARK
from manyformer.libraries.hub_libraries import upload_folder
from manyformer.libraries.library_calls import RefusedByLibrary

MESSAGE = "Export by manyformer"


def push_folder(folder: str | Path, name: str) -> str:
    """Upload a folder to the hub as the model `name`, private if it is new, with the user's own login.

    Returns the address. Raises UserError without the package that uploads, and where the hub does not take it."""
    try:
        return upload_folder(Path(folder), name, MESSAGE, leave_out=[MARK])
    except ImportError:
        raise UserError("--push needs the package huggingface_hub: pip install 'manyformer[hf]'") from None
    except RefusedByLibrary as error:
        problem = f"{folder} is written, but it could not be pushed to {name} on the hub"
        raise UserError(f"{problem}: {error}; the same command tries it again") from None
