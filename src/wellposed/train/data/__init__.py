"""Labelled images to train on, by name: see :func:`open_data`."""

from wellposed.train.data.archives import pack
from wellposed.train.data.images import ImageData, Split, UnreadableImageError, decode_all, decode_readable
from wellposed.train.data.sets import open_data

__all__ = ["ImageData", "Split", "UnreadableImageError", "decode_all", "decode_readable", "open_data", "pack"]
