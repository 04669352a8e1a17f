"""A smaller packed set with validation images, for studies whose settings must not be chosen by test images.

    python -m studies.subset cifar10.npz cifar10-20k.npz [--train 20000] [--validation 2500] [--whiten]

Training and validation images are drawn from the training split, the test split stays. The file is one that
``packed:`` reads; its third split, ``validation``, is read by :func:`validation_split` alone. ``--whiten``
writes a second file, ``cifar10-20k-zca.npz``, with the same images after ZCA: with mean mu and covariance
U diag(l) U^T of the training pixels,

    x -> U diag(l + e)^(-1/2) U^T (x - mu),    e = a tenth of the mean of l,

as 8 bits from -3.5 to 3.5 standard deviations.
"""

import argparse
import io
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

Array = npt.NDArray[np.generic]
SPREAD = 3.5
"""Standard deviations that 8 bits hold."""


def draw(source: Mapping[str, Array], train: int, validation: int, seed: int = 0) -> dict[str, Array]:
    """The arrays of the smaller file.

    >>> whole = {"train_bytes": np.arange(6, dtype=np.uint8), "train_offsets": np.arange(4) * 2}
    >>> whole |= {"train_labels": np.array([0, 1, 1])}
    >>> whole |= {name.replace("train", "test"): array for name, array in whole.items()}
    >>> small = draw(whole | {"classes": np.array(["a", "b"])}, train=2, validation=1)
    >>> [len(small[f"{split}_labels"]) for split in ("train", "validation", "test")]
    [2, 1, 3]
    """
    labels = source["train_labels"]
    if train + validation > len(labels):
        raise ValueError(
            f"train + validation must be at most {len(labels)} images, got {train + validation}."
        )
    order = np.random.default_rng(seed).permutation(len(labels))
    made: dict[str, Array] = {"classes": source["classes"]}
    for split, chosen in (("train", order[:train]), ("validation", order[train : train + validation])):
        starts, stops = source["train_offsets"][chosen], source["train_offsets"][chosen + 1]
        parts = [source["train_bytes"][start:stop] for start, stop in zip(starts, stops, strict=True)]
        made[f"{split}_bytes"] = np.concatenate(parts)
        made[f"{split}_offsets"] = np.cumsum([0, *map(len, parts)])
        made[f"{split}_labels"] = labels[chosen]
    return made | {f"test_{name}": source[f"test_{name}"] for name in ("bytes", "offsets", "labels")}


def decoded(source: Mapping[str, Array], split: str) -> npt.NDArray[np.uint8]:
    """Pixels (n, S, S, 3) of a split."""
    data, offsets = source[f"{split}_bytes"], source[f"{split}_offsets"]

    def one(index: int) -> npt.NDArray[np.uint8]:
        content = data[int(offsets[index]) : int(offsets[index + 1])].tobytes()
        return np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))

    with ThreadPoolExecutor() as pool:
        return np.stack(list(pool.map(one, range(len(offsets) - 1))))


def whitened(source: Mapping[str, Array]) -> dict[str, Array]:
    """The same images after ZCA, as PNG files."""
    pixels = {split: decoded(source, split) for split in ("train", "validation", "test")}
    flat = torch.from_numpy(pixels["train"].reshape(len(pixels["train"]), -1)).double() / 255
    mean = flat.mean(0)
    covariance = (flat - mean).T @ (flat - mean) / len(flat)
    values, vectors = torch.linalg.eigh(covariance)
    values = values.clamp(min=0)
    transform = (vectors * (values + 0.1 * values.mean()).rsqrt()) @ vectors.T
    deviation = float(((flat - mean) @ transform).std())
    made: dict[str, Array] = {"classes": source["classes"]}
    for split, images in pixels.items():
        own = (torch.from_numpy(images.reshape(len(images), -1)).double() / 255 - mean) @ transform
        levels = (127.5 + 127.5 / (SPREAD * deviation) * own).round().clamp(0, 255).byte().numpy()
        with ThreadPoolExecutor() as pool:
            files = list(pool.map(_png, levels.reshape(images.shape)))
        made[f"{split}_bytes"] = np.frombuffer(b"".join(files), np.uint8)
        made[f"{split}_offsets"] = np.cumsum([0, *map(len, files)])
        made[f"{split}_labels"] = source[f"{split}_labels"]
    return made


def _png(pixels: npt.NDArray[np.uint8]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def validation_split(path: Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]] | None:
    """Pixels and labels of the validation images of a packed file, if it has some."""
    with np.load(path, allow_pickle=False) as file:
        if "validation_labels" not in file:
            return None
        return decoded(file, "validation"), file["validation_labels"].astype(np.int64)


def zca_file(path: Path) -> Path:
    """Next to a packed file, the one with its whitened images.

    >>> print(zca_file(Path("sets/cifar10-20k.npz")))
    sets/cifar10-20k-zca.npz
    """
    return path.with_name(f"{path.stem}-zca.npz")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", type=int, default=20_000)
    parser.add_argument("--validation", type=int, default=2_500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--whiten", action="store_true")
    options = parser.parse_args()
    with np.load(options.source, allow_pickle=False) as file:
        made = draw(dict(file), options.train, options.validation, options.seed)
    np.savez(options.out, **made)
    if options.whiten:
        np.savez(zca_file(options.out), **whitened(made))


if __name__ == "__main__":
    main()
