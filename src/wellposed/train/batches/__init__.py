"""Batches of images, resident on the device or streamed through workers."""

from wellposed.train.batches.batch import (
    Batch,
    EvalBatch,
    EvalBatches,
    TrainBatches,
    choose_placement,
    make_batches,
)

__all__ = ["Batch", "EvalBatch", "EvalBatches", "TrainBatches", "choose_placement", "make_batches"]
