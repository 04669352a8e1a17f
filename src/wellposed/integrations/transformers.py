"""Kappa and density while the Trainer of transformers trains.

::

    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.add_callback(ConditioningCallback(trainer, images, every=100))
"""

from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from wellposed.probes import Monitor


class ConditioningCallback(TrainerCallback):  # type: ignore[misc]
    """Logs what :class:`wellposed.probes.Monitor` measures, by the trainer's ``log``.

    Args:
        trainer: that it is added to.
        images: as for the monitor; take some that are not trained on.
        options: of the monitor, ``every=100`` say.
    """

    def __init__(self, trainer: Trainer, images: object, **options: Any) -> None:
        self.trainer = trainer
        self.monitor = Monitor(trainer.model, images, **options)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if numbers := self.monitor(state.global_step):
            self.trainer.log(numbers)
