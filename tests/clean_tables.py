"""Code of the docs and the examples teaches, registers and hooks; afterwards all of it is gone."""

import contextlib
from collections.abc import Iterator

from timm.models import _registry
from torch.optim import optimizer

from wellposed.anatomy.table import BLOCKS, EMBEDDINGS

TABLES = (BLOCKS, EMBEDDINGS, _registry._model_entrypoints, optimizer._global_optimizer_post_hooks)


@contextlib.contextmanager
def restored_tables() -> Iterator[None]:
    before = [dict(table) for table in TABLES]
    try:
        yield
    finally:
        for table, kept in zip(TABLES, before, strict=True):
            table.clear()
            table.update(kept)
