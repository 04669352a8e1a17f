"""sigma-Reparam (arXiv 2303.06296): linear layers whose weight is gamma W / sigma_max(W), in place."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from wellposed.anatomy.model import Block, BlockSelection, join_names, refuse_wrapped
from wellposed.anatomy.subclass import inner, quantised
from wellposed.linalg.precision import in_float64, without_autocast
from wellposed.surgery.choose import choose
from wellposed.surgery.record import Edits, Setting
from wellposed.surgery.weights import WeightEdit, edit_weights

KIND = "normalise_spectrum"
Layers = Literal["all", "attention", "ffn"]
Init = Literal["one", "identity"]


class NormalisedWeight(WeightEdit):
    """gamma W / sigma(W), with sigma = u^T W v and one step of power iteration on u, v a training pass.

    Args:
        weight: as it is now: u and v start as its first singular vectors.
        where: which layers were asked for.
        init: where ``gamma`` starts: ``"one"``, as in the paper, or ``"identity"``, sigma(W), so that a
            trained model computes what it did.
    """

    u: Tensor
    v: Tensor

    def __init__(self, weight: Tensor, where: str, init: Init = "one") -> None:
        super().__init__()
        self.kind, self.where, self.init = KIND, where, init
        U, S, Vh = torch.linalg.svd(in_float64(weight.detach()), full_matrices=False)
        if not S[0] > 0:
            raise ValueError("expected a weight with a largest singular value above 0, got zeros.")
        self.register_buffer("u", U[:, 0].to(weight.dtype))
        self.register_buffer("v", Vh[0].to(weight.dtype))
        start = torch.ones_like(S[0]) if init == "one" else S[0]
        self.gamma = nn.Parameter(start.to(weight.dtype))

    def forward(self, weight: Tensor) -> Tensor:
        with without_autocast(weight):
            if self.training and not _is_recomputed():
                self._follow(weight.detach())
            # Copies, since the buffers change before the backward pass of a model that runs twice.
            return self.gamma / torch.dot(self.u.clone(), weight @ self.v.clone()) * weight

    @torch.no_grad()
    def _follow(self, weight: Tensor) -> None:
        u = nn.functional.normalize(weight @ self.v, dim=0)
        self.v.copy_(nn.functional.normalize(weight.mT @ u, dim=0))
        self.u.copy_(u)

    @property
    def settings(self) -> Mapping[str, Setting]:
        return {"init": self.init}

    def extra_repr(self) -> str:
        return "" if self.init == "one" else f"init={self.init!r}"


def _is_recomputed() -> bool:
    """Whether a checkpointed block runs again in the backward pass: with the u and v of its first run then.

    Compiled programs keep what they need, or recompute it from the same buffers.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def normalise_spectrum(
    model: nn.Module,
    which: Layers = "all",
    *,
    init: Init = "one",
    blocks: BlockSelection = None,
    example: Any = None,
) -> Edits:
    """Let linear layers use gamma W / sigma_max(W), in place: against collapsing entropy of attention.

    W stays a parameter under its name; ``gamma`` is one learned number a layer, u and v are buffers next to
    it. Make the optimizer after this edit.

    Args:
        model: any transformer, not yet compiled, sharded or replicated.
        which: ``"all"`` linear layers of the blocks, those of ``"attention"``, or of the ``"ffn"``.
        init: where gamma starts: ``"one"``, as in the paper, for a fresh model; ``"identity"`` for one
            that is trained, which then computes what it did.
        blocks: an index, a slice, several indices, or None for every block that has such layers.
        example: an input to run your own model on, once, to find its blocks; see
            :func:`wellposed.anatomy.blocks`. Not needed for timm, transformers and torchvision.

    Returns:
        What was touched.

    >>> import timm, wellposed as wp
    >>> model = timm.create_model("vit_tiny_patch16_224")
    >>> print(wp.normalise_spectrum(model, "ffn", blocks=0))
    edit                where  block  module            detail
    normalise_spectrum  ffn    0      blocks.0.mlp.fc1  NormalisedWeight()
    normalise_spectrum  ffn    0      blocks.0.mlp.fc2  NormalisedWeight()
    """
    refuse_wrapped(model)
    if which not in get_args(Layers):
        raise ValueError(f"which must be one of {', '.join(get_args(Layers))}, got {which!r}.")
    if init not in get_args(Init):
        raise ValueError(f"init must be one of {', '.join(get_args(Init))}, got {init!r}.")
    chosen = choose(model, blocks, lambda block: _layers(block, which), "normalising spectra", example)
    weights = {id(layer): (name, layer, parameter) for _, found in chosen for name, layer, parameter in found}
    return edit_weights(
        model,
        [
            (name, layer, parameter, NormalisedWeight(getattr(layer, parameter), which, init))
            for name, layer, parameter in weights.values()
        ],
    )


def _layers(block: Block, which: Layers) -> list[tuple[str, nn.Module, str]] | str:
    """Names, layers and parameters of the linear layers of a block, or why it has none such."""
    attention = set()
    try:
        attention = set(block.attention()[1].modules())
    except ValueError as none:
        if which == "attention":
            return str(none)
    found: list[tuple[str, nn.Module, str]] = []
    for path, module in block.module.named_modules():
        is_wanted = which == "all" or (module in attention) == (which == "attention")
        name = join_names(block.name, path)
        if is_wanted and isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
            found.append((name, module, "in_proj_weight"))
        if is_wanted and isinstance(module, nn.Linear):
            found.append((name, module, "weight"))
    for _, layer, parameter in found:
        if reason := quantised(getattr(inner(layer), parameter)):
            return f"a weight of it {reason}; edit the model and call wp.fold(model) before"
    return found or f"it has no linear layer of {which}"
