"""The Trainer of transformers: the edit before it, the monitor as a callback.

pip install 'wellposed[transformers]'
python examples/transformers_trainer.py --epochs 10
"""

import argparse

from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

import wellposed as wp
from wellposed.digits import load_digits
from wellposed.integrations.transformers import ConditioningCallback
from wellposed.probes import Monitor


def main(epochs: int, depth: int) -> None:
    data = load_digits(seed=0)
    size = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
    width = {"hidden_size": 48, "num_attention_heads": 3, "intermediate_size": 192}
    model = ViTForImageClassification(ViTConfig(num_hidden_layers=depth, **size, **width))
    wp.remove_skips(model, "ffn")  # an ablation, before the Trainer wraps the model
    images = [
        {"pixel_values": image, "labels": label}
        for image, label in zip(data.train_x, data.train_y, strict=True)
    ]
    arguments = TrainingArguments(
        output_dir="runs/trainer",
        num_train_epochs=epochs,
        per_device_train_batch_size=64,
        learning_rate=1e-3,
        report_to="none",
        save_strategy="no",
    )
    trainer = Trainer(model, arguments, train_dataset=images)
    trainer.add_callback(ConditioningCallback(trainer, data.test_x[:8], every=20))
    trainer.train()
    for entry in trainer.state.log_history:
        if "kappa/attention.branch/worst" in entry:
            worst = Monitor.text(entry, "kappa/attention.branch/worst")  # with a sign where it is a bound
            print(f"step {entry['step']}: worst kappa of attention {worst}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--depth", type=int, default=6, help="blocks of the model")
    main(**vars(parser.parse_args()))
