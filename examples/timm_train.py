"""timm's own train.py, untouched, with a grayed model and a monitor.

Put this file beside timm's train.py (it is in timm's repository, not in its package), a few validation images
into the folder `watched`, and give it the options of train.py, with the model's name from below:

    python timm_train.py DATA_DIR --model vit_small_grayed --epochs 300
    torchrun --nproc-per-node 8 timm_train.py DATA_DIR --model vit_small_grayed --epochs 300
"""

import itertools
import os
import runpy

import timm
from timm.models import register_model
from torch.optim.optimizer import register_optimizer_step_post_hook

import wellposed as wp
from wellposed.probes import Monitor


@register_model
def vit_small_grayed(pretrained=False, **options):
    """train.py makes its model by name, before optimizer, EMA, DDP and compile."""
    model = timm.create_model("vit_small_patch16_224", pretrained=pretrained, **options)
    wp.gray_tokens(model, eps=0.7)
    watch(model, "watched")
    return model


def watch(model, images, every=100):
    """train.py calls nothing of ours, but torch calls this after each step of any optimizer."""
    monitor, steps = Monitor(model, images, every=every), itertools.count()

    def after_step(optimizer, args, kwargs):
        if (seen := monitor(next(steps))) and os.environ.get("RANK", "0") == "0":
            print(
                {name: round(value, 3) for name, value in seen.items() if "worst" in name or "mean" in name}
            )

    register_optimizer_step_post_hook(after_step)


if __name__ == "__main__":
    runpy.run_path("train.py", run_name="__main__")
