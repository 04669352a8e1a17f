"""The monitor in other people's trainers."""

from typing import Any

import pytest
import torch
from torch import nn

import zoo
from wellposed.probes import Monitor

VIT = zoo.BY_NAME["timm vit"]
IMAGES = 2


@pytest.mark.parametrize("is_inside", [True, False])
def test_lightning(is_inside: bool) -> None:
    lightning = pytest.importorskip("lightning")
    from wellposed.integrations.lightning import ConditioningCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = VIT.model()

        def forward(self, x: torch.Tensor) -> Any:
            return self.net(x)

        def training_step(self, batch: list[torch.Tensor], _: int) -> Any:
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    x = VIT.input(4)
    data = torch.utils.data.TensorDataset(x, torch.arange(4) % 5)
    watch = ConditioningCallback(x[:IMAGES], every=2, attribute="net" if is_inside else "model")
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, callbacks=[watch], log_every_n_steps=1, **quiet
    )
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
    expected = Monitor(module.net, x[:IMAGES]).measure()
    assert {key for key in trainer.callback_metrics if not key.endswith("at_least")} == {
        key for key in expected if not key.endswith("at_least")
    }
    key = "kappa/0/input"
    assert trainer.callback_metrics[key].item() == pytest.approx(expected[key], rel=1e-3)


def test_transformers(tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    from wellposed.integrations.transformers import ConditioningCallback

    size = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2}
    config = transformers.ViTConfig(**size, num_attention_heads=2, intermediate_size=64, num_labels=5)
    model = transformers.ViTForImageClassification(config)
    data = [{"pixel_values": torch.randn(3, 32, 32), "labels": i % 5} for i in range(8)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        max_steps=4,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=data)
    trainer.add_callback(ConditioningCallback(trainer, torch.randn(IMAGES, 3, 32, 32), every=2))
    trainer.train()
    measured = [entry for entry in trainer.state.log_history if "kappa/input/worst" in entry]
    assert [entry["step"] for entry in measured] == [2, 4]
    assert measured[0]["kappa/0/input"] > 1
