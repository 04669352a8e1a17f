"""Labelled images to train on, by name: see :func:`open_data`."""

from wellposed.train.data.decoding import decode_all, decode_readable
from wellposed.train.data.images import UnreadableImageError
from wellposed.train.data.opening import open_data
from wellposed.train.data.packing import pack
from wellposed.train.data.split import ImageData, Split

__all__ = ["ImageData", "Split", "UnreadableImageError", "decode_all", "decode_readable", "open_data", "pack"]
