"""What a run is (state) and how it is committed to disk (store)."""

from lumen.checkpoint.fingerprint import check_resumable, config_fingerprint, position_values, versions
from lumen.checkpoint.rng import rng_state, seed_everything, set_rng_state
from lumen.checkpoint.state import TrainState, read_rng, read_state, restore_optimizer, restore_weights, save_state
from lumen.checkpoint.store import Store

__all__ = [
    "Store", "TrainState", "check_resumable", "config_fingerprint", "position_values", "read_rng", "read_state",
    "restore_optimizer", "restore_weights", "rng_state", "save_state", "seed_everything", "set_rng_state", "versions",
]  # fmt: skip
