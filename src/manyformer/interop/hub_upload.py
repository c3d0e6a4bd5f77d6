"""Exported folders on the Hugging Face hub."""

from pathlib import Path

from manyformer.errors import UserError
from manyformer.files.unfinished_folder import MARK

MESSAGE = "Export by manyformer"


def push_folder(folder: str | Path, name: str) -> str:
    """Upload a folder to the hub as the model `name`, private if it is new, with the user's own login.

    Returns the address. Raises UserError without the package that uploads, and where the hub does not take it."""
    try:
        import huggingface_hub
    except ImportError:
        raise UserError("--push needs the package huggingface_hub: pip install 'manyformer[hf]'") from None
    api = huggingface_hub.HfApi()
    try:
        address = api.create_repo(repo_id=name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=str(folder), commit_message=MESSAGE, ignore_patterns=[MARK])
    # the package raises whatever its transport does
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        problem = f"{folder} is written, but it could not be pushed to {name} on the hub"
        raise UserError(f"{problem}: {reason}; the same command tries it again") from None
    return str(address)
