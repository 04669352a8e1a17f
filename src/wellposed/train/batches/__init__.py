"""Batches of images, resident on the device or streamed through workers."""

from wellposed.train.batches.batch import Batch, EvalBatch, EvalBatches, ResidentBatches, TrainBatches
from wellposed.train.batches.make import choose_placement, make_batches
from wellposed.train.batches.streamed import ResidentEval, StreamedBatches, StreamedEval

__all__ = [
    "Batch",
    "EvalBatch",
    "EvalBatches",
    "ResidentBatches",
    "ResidentEval",
    "StreamedBatches",
    "StreamedEval",
    "TrainBatches",
    "choose_placement",
    "make_batches",
]
