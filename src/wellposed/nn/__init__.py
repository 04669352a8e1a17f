"""Token Graying and Context Broadcasting, as functions and as modules. Knows no model."""

from wellposed.nn import functional
from wellposed.nn.broadcast import ContextBroadcast
from wellposed.nn.graying import DEFAULT_EPS, PixelGraying, TokenGraying

__all__ = ["DEFAULT_EPS", "ContextBroadcast", "PixelGraying", "TokenGraying", "functional"]
