"""Lightning: the edit in the module's constructor, the monitor as a callback.

pip install lightning
python examples/lightning_callback.py --epochs 10
"""

import argparse

import lightning
import timm
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import wellposed as wp
from wellposed.digits import load_digits
from wellposed.integrations.lightning import ConditioningCallback

VIT = {"img_size": 8, "patch_size": 2, "in_chans": 1, "num_classes": 10, "embed_dim": 48}


class Classifier(lightning.LightningModule):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.model = timm.create_model("vit_tiny_patch16_224", depth=depth, **VIT)
        wp.gray_tokens(self.model, eps=0.7)  # before configure_optimizers and the strategy see it

    def training_step(self, batch, batch_idx) -> torch.Tensor:
        images, labels = batch
        return cross_entropy(self.model(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--depth", type=int, default=6, help="blocks of the model")
    arguments = parser.parse_args()
    data = load_digits(seed=0)
    loader = DataLoader(TensorDataset(data.train_x, data.train_y), batch_size=64, shuffle=True)
    watch = ConditioningCallback(data.test_x[:8], every=len(loader))
    trainer = lightning.Trainer(max_epochs=arguments.epochs, logger=False, callbacks=[watch])
    trainer.fit(Classifier(arguments.depth), loader)
    print({name: value.item() for name, value in trainer.callback_metrics.items() if "worst" in name})
