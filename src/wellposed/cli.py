"""The command ``wellposed``: one application, which importing the commands fills."""

from wellposed.commands import doctor, elsewhere, measure, training
from wellposed.commands.app import app

__all__ = ["app", "doctor", "elsewhere", "measure", "training"]
