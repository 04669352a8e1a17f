"""Diagnose trained weights, and compare them with the same model untrained.

    python examples/diagnose_checkpoint.py --epochs 10

The first lines train a small checkpoint, so that the script runs without one; then the folder that
`wellposed train` leaves is opened. `wellposed diagnose runs/checkpoint` does the measuring alone. With your
own file, wellposed.models.build makes the model: build("vit_base_patch16_224", weights="mine.safetensors").
"""

import argparse

import wellposed as wp
from wellposed.train import Recipe, fit, open_run


def main(epochs: int, depth: int) -> None:
    recipe = Recipe(epochs=epochs, model_options={"depth": depth}, trackers=())
    folder = fit(recipe, out="runs/checkpoint", overwrite=True, quiet=True).folder

    run = open_run(folder)  # its images are some of the run's own test images
    before, after = (wp.diagnose(run.model(weights), run.images) for weights in ("initial", "best"))
    print(after)
    print(before.compare(after, ("untrained", "trained")))
    after.save(folder / "diagnosis")
    worst = max(after.select("kappa", position="attention.branch"), key=lambda record: record.value)
    print(f"worst: {worst.module}, kappa {worst.text()}; written to {folder / 'diagnosis'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--depth", type=int, default=6, help="blocks of the model")
    main(**vars(parser.parse_args()))
