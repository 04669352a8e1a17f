"""A transformer of one's own: one row teaches wellposed its block, then every edit and probe works.

python examples/own_model.py
"""

import torch
from torch import Tensor, nn

import wellposed as wp
from wellposed.anatomy import Add, BlockRow, EmbeddingRow, after, before, taps, teach, verify


class MyBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix = nn.MultiheadAttention(width, 4, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.mix(h, h, h, need_weights=False)[0]
        return x + self.ff(self.norm2(x))


class MyModel(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, kernel_size=8, stride=8)
        self.blocks = nn.ModuleList(MyBlock(width) for _ in range(3))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).mT
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


adds = (Add("attention", skip="x"), Add("ffn", skip="x"))  # in the order of forward's source
feed_forward = (before("ff.0"), after("ff.2"))  # a Sequential: its first and last element
row = BlockRow("mine", adds, taps(attention=after("mix"), mlp=feed_forward, last_linear="ff.2"))
teach(MyBlock, row)
teach(MyModel, EmbeddingRow("mine", after("patches"), patch_convolution="patches", layout="NCHW"))

torch.manual_seed(0)
model, images = MyModel(), torch.randn(4, 3, 32, 32)
print(verify(model, images), "residual adds are where the row says")
print(wp.gray_tokens(model, eps=0.7))
wp.broadcast_context(model)
wp.remove_skips(model, "attention", blocks=0)
print(wp.diagnose(model, images))
