"""Checkpoints that are whole or not there: what a run was, on disk, bit for bit.

``Store`` keeps them in a folder, ``gather`` takes a model and its optimizer apart for one, ``restore`` puts
them together again, in as many processes as there happen to be.
"""

from wellposed.train.checkpoint.store import Checkpoint, CheckpointError, Store
from wellposed.train.checkpoint.training_state import gather, gather_weights, restore, restore_weights

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Store",
    "gather",
    "gather_weights",
    "restore",
    "restore_weights",
]
