"""Batches of images, resident on the device or streamed through workers."""

from wellposed.train.batches.batch import Batch, EvalBatch, EvalBatches, TrainBatches
from wellposed.train.batches.evaluation import ResidentEval, StreamedEval
from wellposed.train.batches.make import make_batches
from wellposed.train.batches.placement import choose_placement
from wellposed.train.batches.resident import ResidentBatches
from wellposed.train.batches.streamed import StreamedBatches

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
