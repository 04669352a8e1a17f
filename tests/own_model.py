"""A transformer that no library has: what a user would bring."""

import torch
from torch import Tensor, nn

WEIGHT_OF_BRANCH = 1.0


class Described(nn.Module):
    def describe(self, x: Tensor) -> Tensor:
        return x * WEIGHT_OF_BRANCH


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.inner(x)))


class OwnBlock(Described):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.mix = nn.LayerNorm(width), nn.Linear(width, width)
        self.norm2, self.ff = nn.LayerNorm(width), FeedForward(width)

    def forward(self, x: Tensor, *, times: int = 1) -> Tensor:
        for _ in range(times):
            x = x + super().describe(self.mix(self.norm1(x)))
            x += self.ff(self.norm2(x))
        return x


class OwnPatches(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 8, 8)

    def forward(self, images: Tensor) -> Tensor:
        return self.conv(images).flatten(2).mT


class OwnModel(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.patches = OwnPatches(width)
        self.blocks = nn.ModuleList(OwnBlock(width) for _ in range(2))

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images)
        for block in self.blocks:
            x = block(x)
        return x
