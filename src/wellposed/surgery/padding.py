"""Keeping padding out of operations that mix tokens.

A block that was given a mask tells the operations inside it which tokens are padding, by hooks that are
functions of this module; so does what is around a patch embedding, if it takes a mask of the patches. Context
Broadcasting takes the mean over the others. Graying is of each text's own tokens; where code is compiled or
exported their number is not known, and a mask that hides any is an error.
"""

import inspect
from typing import Any, cast

from torch import Tensor, nn
from torch.fx import Proxy

from wellposed.anatomy.loops import open_loop
from wellposed.anatomy.masks import MaskReader, hides, mask_reader
from wellposed.anatomy.model import Block, Place
from wellposed.anatomy.subclass import mark, original, unmark
from wellposed.anatomy.table import Layout, to_tokens
from wellposed.nn import ContextBroadcast
from wellposed.surgery.insertion import Inserted, refuse_if

_NESTED = (
    "expected tokens with a mask, got a nested tensor, which nn.TransformerEncoder makes of padded texts; "
    "create it with enable_nested_tensor=False, or call torch.backends.mha.set_fastpath_enabled(False)."
)
_SYMBOLIC = (
    "expected a call without masks, got one: the program of a symbolic trace does not know which tokens are "
    "padding or hidden; give it texts of one length, or make the program with torch.export.export."
)
_FUTURE = (
    "Context Broadcasting got a causal mask: the mean over all tokens would show each token those that come "
    "after it. wp.restore(model) takes the edit out, blocks= names those that are not causal."
)
_OF_PIXELS = (
    "expected a mask of the patches (images, patches), got {name} of shape {shape} that hides some: graying "
    "the embedding cannot tell which tokens are padding; give the model images of one size, or gray with "
    'where="blocks".'
)
PATCH_MASKS = ("patch_valid", "pixel_attention_mask", "pixel_mask")
"""Arguments of models and embeddings that say which patches, or pixels, are no padding."""


def watch_padding(block: Block) -> None:
    """Let a block pass on to the operations inside it which tokens are padding, from now on."""
    module = block.module
    open_loop(module)
    if tell_padding not in module._forward_pre_hooks.values():
        reading = block.row.stream, block.row.layout_of(module), mask_reader(module)
        mark(module)
        module.padding_reader = reading  # type: ignore[assignment]
        module.register_forward_pre_hook(tell_padding, prepend=True, with_kwargs=True)
        module.register_forward_hook(drop_padding, always_call=True)


def tell_padding(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of a block."""
    stream, layout, masks = cast(tuple[int, Layout, MaskReader], module.padding_reader)
    given = [*args, *kwargs.values()][stream]
    x: Tensor = given[0] if isinstance(given, tuple) else given
    if isinstance(x, Proxy):  # of torch.fx, which sees no values
        return _with_a_check(x, masks.given(args, kwargs), args, kwargs)
    if x.is_nested:
        raise TypeError(_NESTED)
    texts, tokens = to_tokens(x, layout).shape[:2]
    padding = masks.padding(args, kwargs, texts, tokens)
    future = masks.is_causal(args, kwargs, tokens)
    for inserted in _operations(module):
        if isinstance(original(inserted.op), ContextBroadcast):
            refuse_if(future, _FUTURE)
        inserted.padding = padding
    return None


def _with_a_check(
    x: Proxy, masks: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a block in a symbolic trace, whose program refuses masks when it runs."""
    checked = x.tracer.create_proxy("call_function", refuse_masks, (x, *masks), {})
    with_check = {name: checked if value is x else value for name, value in kwargs.items()}
    return tuple(checked if value is x else value for value in args), with_check


def refuse_masks(x: Tensor, *masks: Any) -> Tensor:
    """The tokens, if none of the masks is one."""
    if any(mask is not None and mask is not False for mask in masks):
        raise ValueError(_SYMBOLIC)
    return x


def drop_padding(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Forward hook of a block."""
    for inserted in _operations(module):
        inserted.padding = None


def watch_patches(model: nn.Module, place: Place) -> None:
    """Let what is around an embedding pass on to the operation at its end which patches are padding."""
    parts = place.name.split(".")
    for end in range(len(parts)):
        module = model.get_submodule(".".join(parts[:end]))
        parameters = inspect.signature(type(module).forward).parameters
        masks = [(index - 1, name) for index, name in enumerate(parameters) if name in PATCH_MASKS]
        if masks and tell_patches not in module._forward_pre_hooks.values():
            mark(module)
            module.patch_masks = masks  # type: ignore[assignment]
            module.register_forward_pre_hook(tell_patches, prepend=True, with_kwargs=True)
            module.register_forward_hook(drop_patches, always_call=True)


def tell_patches(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a model or an embedding."""
    for index, name in cast(list[tuple[int, str]], module.patch_masks):
        mask = args[index] if index < len(args) else kwargs.get(name)
        if isinstance(mask, Proxy):
            raise ValueError(_SYMBOLIC)
        if isinstance(mask, Tensor):
            hidden = hides(mask, name)
            if hidden.ndim != 2:
                refuse_if(hidden.any(), _OF_PIXELS.format(name=name, shape=tuple(mask.shape)))
                continue
            for inserted in _of_embeddings(module):
                inserted.padding = hidden


def drop_patches(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Forward hook of a model or an embedding."""
    for inserted in _of_embeddings(module):
        inserted.padding = None


def forget_padding(module: nn.Module) -> None:
    """Undo :func:`watch_padding` and :func:`watch_patches`."""
    if tell_padding in module._forward_pre_hooks.values():
        del module.padding_reader
        unmark(module)
    if tell_patches in module._forward_pre_hooks.values():
        del module.patch_masks
        unmark(module)
    before, behind = (tell_padding, tell_patches), (drop_padding, drop_patches)
    for key in [key for key, hook in module._forward_pre_hooks.items() if hook in before]:
        del module._forward_pre_hooks[key]
        module._forward_pre_hooks_with_kwargs.pop(key, None)
    for key in [key for key, hook in module._forward_hooks.items() if hook in behind]:
        del module._forward_hooks[key]
        module._forward_hooks_always_called.pop(key, None)


def _operations(module: nn.Module) -> list[Inserted]:
    return [inner for inner in module.modules() if isinstance(inner, Inserted)]


def _of_embeddings(module: nn.Module) -> list[Inserted]:
    return [inserted for inserted in _operations(module) if inserted.where == "embedding"]
