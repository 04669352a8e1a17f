"""The Trainer of transformers: the edit before it, the monitor as a callback.

pip install 'wellposed[transformers]'
python examples/transformers_trainer.py --epochs 10
"""

import argparse

from transformers import Trainer, TrainerCallback, TrainingArguments, ViTConfig, ViTForImageClassification

import wellposed as wp
from wellposed.digits import load_digits
from wellposed.probes import Monitor


class Conditioning(TrainerCallback):
    def __init__(self, monitor: Monitor, trainer: Trainer) -> None:
        self.monitor, self.trainer = monitor, trainer

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if seen := self.monitor(state.global_step):
            self.trainer.log({name: value for name, value in seen.items() if "worst" in name})


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
    trainer.add_callback(Conditioning(Monitor(model, data.test_x[:8], every=20), trainer))
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
