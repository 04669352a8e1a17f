"""A linear probe: the head learns on features that stay as they are.

>>> import timm
>>> model = timm.create_model("test_vit", img_size=32, num_classes=10)
>>> [parameter.shape for parameter in freeze_for_probe(model)]
[torch.Size([10, 64]), torch.Size([10])]
>>> probe_train_mode(model)
>>> model.blocks.training, model.head.training
(False, True)
"""

from typing import Any

from torch import nn

from wellposed.probes.observe import plain


def classifiers(model: nn.Module) -> dict[str, nn.Module]:
    """The classifier of a timm model by its name in the model; a distilled DeiT has two."""
    inner: Any = plain(model)
    found = inner.get_classifier()
    wanted = found if isinstance(found, (tuple, list)) else (found,)
    return {name: module for name, module in inner.named_modules() if any(module is head for head in wanted)}


def freeze_for_probe(model: nn.Module) -> list[nn.Parameter]:
    """Freeze all but the classifier, and go to :func:`probe_train_mode`. Returns what is left to train."""
    heads = classifiers(model).values()
    left = [parameter for head in heads for parameter in head.parameters()]
    if not left:
        raise ValueError(
            "a linear probe trains the model's head, got a model without one; use num_classes >= 2."
        )
    model.requires_grad_(False)
    for parameter in left:
        parameter.requires_grad_(True)
    probe_train_mode(model)
    return left


def probe_train_mode(model: nn.Module) -> None:
    """Instead of ``model.train()``: the trunk's dropout and batch norm stay as in evaluation."""
    model.eval()
    for head in classifiers(model).values():
        head.train()
