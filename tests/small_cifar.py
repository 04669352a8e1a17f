"""CIFAR-10 as it is distributed, with a few random images."""

import pickle
import struct
from pathlib import Path

import numpy as np

NAMES = ["airplane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
EACH = 20


def rows(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (EACH, 3072), dtype=np.uint8)


def labels(seed: int, classes: int = 10) -> list[int]:
    return np.random.default_rng([seed, 1]).permutation(np.arange(EACH) % classes).tolist()


def of_python_2(data: np.ndarray, values: list[int]) -> bytes:
    """A batch as Python 2 pickled it: byte strings, and numpy.core."""

    def text(content: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(content)) + content

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    dtype = b"cnumpy\ndtype\n" + b"(" + text(b"u1") + number(0) + number(1) + b"tR"
    dtype += b"(" + number(3) + text(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n" + number(0) + b"\x85" + text(b"b") + b"tR"
    )
    shape = b"(" + number(data.shape[0]) + number(data.shape[1]) + b"t"
    array += b"(" + number(1) + shape + dtype + b"\x89" + text(data.tobytes()) + b"tb"
    listed = b"](" + b"".join(map(number, values)) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + listed + b"u."


def write_cifar10(root: Path) -> Path:
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for number in range(1, 6):
        (folder / f"data_batch_{number}").write_bytes(of_python_2(rows(number), labels(number)))
    # Python 3 writes the same with other names: _codecs.encode and numpy._core, as its protocol has it.
    (folder / "test_batch").write_bytes(pickle.dumps({"data": rows(6), "labels": labels(6)}, protocol=2))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": NAMES}, protocol=4))
    return folder
