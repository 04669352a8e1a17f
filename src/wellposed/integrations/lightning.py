"""Kappa and density while Lightning trains.

::

    trainer = lightning.Trainer(callbacks=[ConditioningCallback(images, every=100)])
"""

from typing import Any

import lightning
from torch import nn

from wellposed.probes import Monitor


class ConditioningCallback(lightning.Callback):
    """Logs what :class:`wellposed.probes.Monitor` measures, by the module's ``log_dict``.

    Args:
        images: as for the monitor; take some that are not trained on.
        attribute: of the module, where the model is; a module without it is the model itself.
        options: of the monitor, ``every=100`` say.
    """

    def __init__(self, images: object, *, attribute: str = "model", **options: Any) -> None:
        self.images, self.attribute, self.options = images, attribute, options

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        model = getattr(pl_module, self.attribute, None)
        model = model if isinstance(model, nn.Module) else pl_module
        self.monitor = Monitor(model, self.images, **self.options)

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        pl_module.log_dict(self.monitor(trainer.global_step))
