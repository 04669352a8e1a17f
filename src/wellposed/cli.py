"""The command ``wellposed``: one application, which importing the commands fills."""

from wellposed.commands import benchmarks, doctor, measure, studies, training
from wellposed.commands.app import app

__all__ = ["app", "benchmarks", "doctor", "measure", "studies", "training"]
