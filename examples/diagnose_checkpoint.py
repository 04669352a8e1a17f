"""Diagnose trained weights, and compare them with the same model untrained.

    python examples/diagnose_checkpoint.py --epochs 10

The first lines train a small checkpoint, so that the script runs without one; then the folder that
`wellposed train` leaves is opened by plain timm. With your own file, wellposed.models.build does the same:
build("vit_base_patch16_224", weights="mine.safetensors").
"""

import argparse

import timm
import torch
from safetensors.torch import load_file

import wellposed as wp
from wellposed.train import Recipe, fit
from wellposed.train.data.digits import all_digits


def main(epochs: int, depth: int) -> None:
    recipe = Recipe(epochs=epochs, model_options={"depth": depth}, trackers=())
    run = fit(recipe, out="runs/checkpoint", overwrite=True, quiet=True)

    torch.manual_seed(0)
    options = {"depth": depth, "img_size": 8, "patch_size": 2, "in_chans": 1, "num_classes": 10}
    untrained = timm.create_model("test_vit", **options)
    trained = timm.create_model("test_vit", **options)
    trained.load_state_dict(load_file(run.folder / "best" / "model.safetensors"))

    pixels, _ = all_digits()
    images = torch.from_numpy(pixels[:32]).unsqueeze(1) / 127.5 - 1  # as the run's card says
    before, after = wp.diagnose(untrained, images), wp.diagnose(trained, images)
    print(after)
    print(before.compare(after, ("untrained", "trained")))
    after.save(run.folder / "diagnosis")
    worst = max(after.select("kappa", position="attention.branch"), key=lambda record: record.value)
    print(f"worst: {worst.module}, kappa {worst.text()}; written to {run.folder / 'diagnosis'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--depth", type=int, default=6, help="blocks of the model")
    main(**vars(parser.parse_args()))
