"""torch_xla.utils.checkpoint_tagger: names for checkpoint files."""

from __future__ import annotations

from xla_core.torch_features.checkpoint_tags import CheckpointTagger as CheckpointTagger
