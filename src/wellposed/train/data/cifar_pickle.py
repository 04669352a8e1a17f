"""Read the pickles that CIFAR comes in, without running what a pickle can run.

A pickle may call any function of any module. These files need one: numpy's array, from raw bytes. Here it is
done by stand-ins of this module, so that nothing else is imported or called, numpy's own unpickling included;
a file that asks for anything else is refused.
"""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


def read_pickle(path: Path) -> dict[str, Any]:
    """The dictionary of a CIFAR file, with numpy arrays in it."""
    try:
        with path.open("rb") as file:
            content = _Restricted(file, path).load()
    except (FileNotFoundError, _ForbiddenError):
        raise
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise ValueError(
            f"{path} is damaged or no file of CIFAR ({type(error).__name__}: {error}); unpack the set anew."
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"expected a dictionary in {path}, got {type(content).__name__}.")
    return {
        str(key): value.array(path) if isinstance(value, _Array) else value for key, value in content.items()
    }


class _ForbiddenError(ValueError):
    pass


class _Dtype:
    def __init__(self, name: Any = "", *_: Any) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None:
        """Byte order and the like; whole bytes have none."""


class _Array:
    """Holds an array's state as plain values until the file is read."""

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def array(self, path: Path) -> npt.NDArray[np.uint8]:
        match self.state:
            case (_, tuple(shape), _Dtype(name="u1" | "|u1"), bool(is_fortran), bytes(raw) | str(raw)):
                whole = np.frombuffer(raw.encode("latin1") if isinstance(raw, str) else raw, np.uint8)
                return whole.reshape(shape, order="F" if is_fortran else "C")
            case _:
                raise ValueError(f"expected an array of bytes in {path}, got another one.")


def _from_buffer(raw: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    """The newest protocol writes arrays so."""
    array = _Array()
    array.state = (1, shape, dtype, order == "F", bytes(raw) if isinstance(raw, bytearray) else raw)
    return array


class _NdarrayType:
    """What the file says the array's type is; it is never made."""


def _bytes_of(text: Any, encoding: Any = "latin1") -> bytes:
    """Python 3 writes bytes so in the older protocols."""
    if not isinstance(text, str) or encoding != "latin1":
        raise ValueError("expected text to be encoded as latin1")
    return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], Any] = {
    **{
        (f"{core}.{module}", name): stand_in
        for core in ("numpy.core", "numpy._core")
        for module, name, stand_in in (
            ("multiarray", "_reconstruct", _Array),
            ("numeric", "_frombuffer", _from_buffer),
        )
    },
    ("numpy", "ndarray"): _NdarrayType,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _bytes_of,
    **{
        (module, kind.__name__): kind
        for module in ("builtins", "__builtin__")
        for kind in (bytearray, bytes, dict, frozenset, list, set, tuple)
    },
}


class _Restricted(pickle.Unpickler):
    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file, encoding="latin1")  # they were written by Python 2
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise _ForbiddenError(
                f"{self._path} asks to run {module}.{name}, which no file of CIFAR needs; it was refused and "
                "nothing was run. The file is not the original: get the set anew."
            ) from None
