"""Token Graying (arXiv 2505.01996) as modules, of tokens and of the pixels under them."""

import torch
from torch import Tensor

from wellposed.linalg import Precision
from wellposed.linalg.spectral_plan import DEFAULT_TOLERANCE
from wellposed.nn import functional
from wellposed.nn.functional import DEFAULT_EPS, Method
from wellposed.nn.operation import Operation

__all__ = ["DEFAULT_EPS", "PixelGraying", "TokenGraying"]


class TokenGraying(Operation):
    """Gray tokens (..., N, D): see :func:`wellposed.nn.functional.gray`.

    The module has no parameters or buffers and treats training and evaluation alike.

    Args:
        eps: the power of the singular values; None is the paper's choice for the method.
        method: ``"spectral"``, ``"svd"``, ``"dct"``, ``"condition"`` or ``"energy"``.
        target_kappa, rescale, floor, tolerance, precision: as of the function.

    >>> TokenGraying(0.7, "dct")
    TokenGraying(eps=0.7, method='dct')
    >>> TokenGraying(target_kappa=10, floor=1e-5)
    TokenGraying(target_kappa=10, method='spectral', floor=1e-05)
    """

    def __init__(
        self,
        eps: float | None = None,
        method: Method = "spectral",
        *,
        target_kappa: float | None = None,
        rescale: bool = True,
        floor: float | None = None,
        tolerance: float = DEFAULT_TOLERANCE,
        precision: Precision = "auto",
    ) -> None:
        super().__init__()
        # An unknown method is refused below, whatever its eps.
        usual = DEFAULT_EPS.get(method) if target_kappa is None else None
        self.eps: float | Tensor | None = usual if eps is None else eps
        self.method: Method = method
        self.target_kappa = target_kappa
        self.rescale = rescale
        self.floor = floor
        self.tolerance = tolerance
        self.precision: Precision = precision
        # A wrong setting should fail where it is written, not at the first batch.
        self._gray(torch.zeros(1, 1, device="cpu"))

    def _gray(self, x: Tensor) -> Tensor:
        return functional.gray(
            x,
            self.eps,
            self.method,
            target_kappa=self.target_kappa,
            rescale=self.rescale,
            floor=self.floor,
            tolerance=self.tolerance,
            precision=self.precision,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self._gray(x)

    @property
    def settings(self) -> dict[str, float | str | None]:
        """What it was made with, as plain numbers and words; ``eps`` is today's, it may have changed."""
        return {
            "eps": None if self.eps is None else float(self.eps),
            "method": self.method,
            "target_kappa": None if self.target_kappa is None else float(self.target_kappa),
            "rescale": bool(self.rescale),
            "floor": None if self.floor is None else float(self.floor),
            "tolerance": float(self.tolerance),
            "precision": self.precision,
        }

    def extra_repr(self) -> str:
        shown: dict[str, object] = {"eps": None if self.eps is None else float(f"{float(self.eps):.6g}")}
        shown |= {"target_kappa": self.target_kappa, "method": self.method}
        shown |= {"rescale": None if self.rescale else False, "floor": self.floor}
        shown["tolerance"] = None if self.tolerance == DEFAULT_TOLERANCE else self.tolerance
        shown["precision"] = None if self.precision == "auto" else self.precision
        return ", ".join(f"{name}={value!r}" for name, value in shown.items() if value is not None)


class PixelGraying(TokenGraying):
    """Gray the patch matrix of images (..., C, H, W) and give images back.

    Row n of the matrix is patch n, read as a patch convolution reads it: channel, row, column. As the
    last step of a torchvision transform it sees one image (C, H, W) and runs in the data loader's
    workers; inside a model it sees a batch.

    Args:
        patch_size: of the patches, in pixels: a side, or height and width.
        eps, method, target_kappa, rescale, floor, tolerance, precision: as of :class:`TokenGraying`.

    >>> images = torch.rand(2, 3, 32, 32)
    >>> PixelGraying(8, eps=0.7)(images).shape
    torch.Size([2, 3, 32, 32])
    """

    def __init__(
        self,
        patch_size: int | tuple[int, int],
        eps: float | None = None,
        method: Method = "spectral",
        *,
        target_kappa: float | None = None,
        rescale: bool = True,
        floor: float | None = None,
        tolerance: float = DEFAULT_TOLERANCE,
        precision: Precision = "auto",
    ) -> None:
        super().__init__(
            eps,
            method,
            target_kappa=target_kappa,
            rescale=rescale,
            floor=floor,
            tolerance=tolerance,
            precision=precision,
        )
        sides = patch_size if isinstance(patch_size, tuple) else (patch_size, patch_size)
        if len(sides) != 2 or not all(type(side) is int for side in sides):
            raise TypeError(
                f"patch_size must be an integer or two (height, width), got {patch_size!r}; "
                "16 is usual for ViT."
            )
        if min(sides) < 1:
            raise ValueError(f"patch_size must be positive, got {patch_size}; 16 is usual for ViT.")
        self.patch_size = sides

    def forward(self, images: Tensor) -> Tensor:
        if not isinstance(images, Tensor):
            raise TypeError(
                f"images must be a torch.Tensor (..., C, H, W), got {type(images).__name__}; put "
                "v2.ToImage() and v2.ToDtype(torch.float32, scale=True) before PixelGraying."
            )
        if images.ndim < 3:
            raise ValueError(
                f"images must have at least three axes (..., C, H, W), got shape {tuple(images.shape)}; "
                "image[None] adds the channel of a grey image."
            )
        *_, channels, height, width = images.shape
        patch_height, patch_width = self.patch_size
        if height % patch_height or width % patch_width:
            raise ValueError(
                f"image size must be a multiple of the patch size {patch_height} x {patch_width}, "
                f"got {height} x {width}; resize, crop or pad the images first."
            )
        grid = (height // patch_height, width // patch_width)
        # (..., C, gh*ph, gw*pw) -> (..., gh, gw, C, ph, pw) -> (..., N, D)
        leading = images.shape[:-3]
        pieces = images.reshape(*leading, channels, grid[0], patch_height, grid[1], patch_width)
        patches = pieces.movedim((-4, -2), (-5, -4)).flatten(-3).flatten(-3, -2)
        pieces = self._gray(patches).reshape(*leading, *grid, channels, patch_height, patch_width)
        return pieces.movedim((-5, -4), (-4, -2)).reshape(images.shape)

    def extra_repr(self) -> str:
        return f"patch_size={self.patch_size}, {super().extra_repr()}"
