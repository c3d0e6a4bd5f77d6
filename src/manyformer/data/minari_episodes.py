"""Local data sets of Minari as recorded episodes."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyformer.data.trajectory_archive import STEP_ARRAYS, RecordedEpisodes, check_episodes
from manyformer.errors import UserError, suggest_names

MINARI_PREFIX = "minari:"


def read_minari(path: str) -> RecordedEpisodes:
    """The episodes of the local data set `minari:NAME`; nothing is downloaded. Raises UserError for a defect."""
    try:
        import minari
    except ImportError:
        raise UserError(f"{path}: this needs the package minari: pip install 'manyformer[rl]'") from None
    name = path.removeprefix(MINARI_PREFIX)
    local_names = list(minari.list_local_datasets())
    if name not in local_names:
        suggestion = suggest_names(name, local_names) if local_names else "there are none on this machine"
        raise UserError(f"{path}: there is no local Minari data set of that name; {suggestion}")
    episodes: list[dict[str, NDArray[Any]]] = []
    try:
        for number, episode in enumerate(minari.load_dataset(name).iterate_episodes()):
            arrays = {key: np.asarray(getattr(episode, key)) for key in STEP_ARRAYS}
            if arrays["observations"].dtype == object:
                raise UserError(f"{path}: the observations of episode {number} must be vectors, not nested ones")
            # Minari also stores what is observed after the last action
            arrays["observations"] = arrays["observations"][: len(arrays["rewards"])]
            episodes.append(arrays)
    except ImportError as error:
        raise UserError(f"{path}: {str(error).strip()}") from error
    except (OSError, ValueError, KeyError, AssertionError) as error:
        raise UserError(f"{path}: this Minari data set cannot be read ({error})") from error
    return check_episodes(_join_episodes(episodes, path), path)


def _join_episodes(episodes: list[dict[str, NDArray[Any]]], path: str) -> dict[str, NDArray[Any]]:
    """The arrays of all episodes end to end, with their lengths. Raises UserError if they do not fit together."""
    if not episodes:
        raise UserError(f"{path}: this Minari data set has no episodes")
    for number, arrays in enumerate(episodes):
        counts = {key: len(array) for key, array in arrays.items()}
        if len(set(counts.values())) > 1:
            raise UserError(f"{path}: episode {number} has {', '.join(f'{n} {key}' for key, n in counts.items())}")
        for key, array in arrays.items():
            if array.shape[1:] != episodes[0][key].shape[1:]:
                raise UserError(f"{path}: the {key} of episode {number} have another shape than those of episode 0")
    joined = {key: np.concatenate([arrays[key] for arrays in episodes]) for key in STEP_ARRAYS}
    return joined | {"lengths": np.array([len(arrays["rewards"]) for arrays in episodes])}
