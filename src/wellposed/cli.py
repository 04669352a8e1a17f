"""The command ``wellposed``: one application, which importing the commands fills."""

from wellposed.commands import benchmarks, measure, studies, training
from wellposed.commands.app import app

__all__ = ["app", "benchmarks", "measure", "studies", "training"]
