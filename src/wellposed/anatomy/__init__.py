"""What a model is made of, and where to cut it: one table row a block class."""

from wellposed.anatomy.model import Block, Embedding, blocks, embeddings, families
from wellposed.anatomy.table import (
    Add,
    AttentionRow,
    BlockRow,
    EmbeddingRow,
    Tap,
    after,
    before,
    no_taps,
    taps,
    teach,
)
from wellposed.anatomy.verify import verify

__all__ = [
    "Add",
    "AttentionRow",
    "Block",
    "BlockRow",
    "Embedding",
    "EmbeddingRow",
    "Tap",
    "after",
    "before",
    "blocks",
    "embeddings",
    "families",
    "no_taps",
    "taps",
    "teach",
    "verify",
]
