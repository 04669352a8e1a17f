"""The command ``wellposed``: one application, which importing the commands fills."""

from wellposed.commands import doctor, measure, reproduce, training
from wellposed.commands.app import app

__all__ = ["app", "doctor", "measure", "reproduce", "training"]
