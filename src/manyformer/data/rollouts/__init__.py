"""Rollouts: policies acting in environments, for learning and for scores."""

from manyformer.data.rollouts.acting_loop import ActingLoop, ActingPolicy, likeliest_actions, sample_actions
from manyformer.data.rollouts.episode_recording import EpisodeBatch, play_episodes, play_steps
from manyformer.data.rollouts.rollout_collector import (
    EPISODE_SCORES,
    ROLLOUT_DIAGNOSTICS,
    RolloutCollector,
    RolloutSettings,
    gae,
    read_collector,
    write_collector,
)
from manyformer.nn.batches.episode_batches import PlayedEpisodes

__all__ = [
    "EPISODE_SCORES",
    "ROLLOUT_DIAGNOSTICS",
    "ActingLoop",
    "ActingPolicy",
    "EpisodeBatch",
    "PlayedEpisodes",
    "RolloutCollector",
    "RolloutSettings",
    "gae",
    "likeliest_actions",
    "play_episodes",
    "play_steps",
    "read_collector",
    "sample_actions",
    "write_collector",
]
