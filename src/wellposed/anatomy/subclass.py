"""Modules of a class made at run time, which differs from the module's own in one thing.

The class of a module is changed in place, so that whatever holds the module holds the edited one. Such a
class keeps the name of the class below it, because sharding policies go by it, and no importable name leads
to it: its modules copy and pickle as those of the class below, plus how it was made.

- A marked module computes nothing else, so that no compiled program of another one is taken for it:
  ``torch.compile`` keeps its programs by class and looks at a module's hooks once, when it compiles. A
  symbolic tracer runs no hooks of the module that it was given, so a marked one refuses to be that.
- A layer that reads a weight ``W`` through an operation, its child, uses ``f(W)`` wherever it uses the
  weight, and so do calls that take the weight without calling the layer (BEiT's fused attention,
  ``nn.MultiheadAttention``). torch's parametrizations rename the parameter and do not pickle; this keeps its
  name and pickles.
- ``nn.MultiheadAttention`` hands one packed weight (3 D, D) and bias (3 D,) to a function, queries first. An
  opened one hands them through its child ``inserted_query``, an operation on the last axis.

The last part is about layers that peft has wrapped: these are found, not made.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import Tensor, nn
from torch.fx import Proxy, Tracer
from torch.nn import functional

# Classes made at run time


def subclass(
    make: Callable[..., type[nn.Module]], base: type[nn.Module], *args: Any, members: Mapping[str, Any] = {}
) -> type[nn.Module]:
    """A class below ``base`` that ``make(base, *args)`` makes again."""
    about = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    metaclass: Any = type(base)
    cls: type[nn.Module] = metaclass(
        base.__name__,
        (base,),
        {**about, "__reduce_ex__": _reduce_ex, "_made_by": (make, base, *args), **members},
    )
    return cls


def own_class_of(cls: type) -> Any:
    """The class below all that was made at run time."""
    while "_made_by" in vars(cls):
        cls = vars(cls)["_made_by"][1]
    return cls


def _reduce_ex(self: nn.Module, protocol: Any) -> Any:
    cls = type(self)
    made = next(each for each in cls.__mro__ if "_made_by" in vars(each))
    if made is not cls:  # FSDP2 and parametrizations make classes on top
        return own_class_of(made).__reduce_ex__(self, protocol)  # type: ignore[arg-type]
    self.__class__ = own_class_of(cls)
    try:
        make, args, *rest = cast(Any, self.__reduce_ex__(max(int(protocol), 2)))
    finally:
        self.__class__ = cls
    return _new_of, (_recipe(cls), make, args), *rest


def _new_of(recipe: Any, make: Callable[..., nn.Module], args: tuple[Any, ...]) -> nn.Module:
    module = make(*args)
    module.__class__ = _made(recipe)
    return module


def _recipe(cls: type[nn.Module]) -> Any:
    if "_made_by" not in vars(cls):
        return cls
    make, base, *args = vars(cls)["_made_by"]
    return (make, _recipe(base), *args)


def _made(recipe: Any) -> type[nn.Module]:
    if isinstance(recipe, type):
        return recipe
    make, base, *args = recipe
    made: type[nn.Module] = make(_made(base), *args)
    return made


# Marks


@functools.cache
def _marked_class(base: Any) -> type[nn.Module]:
    def get_name(self: nn.Module) -> str:
        _refuse_tracer(sys._getframe(1).f_locals.get("self"), self)
        name: str = base._get_name(self)
        return name

    return subclass(_marked_class, base, members={"_get_name": get_name})


def _refuse_tracer(asking: Any, module: nn.Module) -> None:
    """Raise if it is a tracer of torch.fx that asks a module for its name: the one that it begins with."""
    if isinstance(asking, Tracer) and getattr(asking, "root", None) is module:
        raise TypeError(
            f"expected a module around the {type(module).__name__}, whose hooks run edits, got it itself: "
            "torch.fx leaves out the hooks of the module that it traces; trace the whole model, or use "
            "torch.export.export."
        )


def _is_marked(module: nn.Module) -> bool:
    return vars(type(module)).get("_made_by", (None,))[0] is _marked_class


def unmarked_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module, whether it is marked or not."""
    cls: Any = type(module)
    return cls._made_by[1] if _is_marked(module) else cls  # type: ignore[no-any-return]


def set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Change the class of a module; a mark stays."""
    hashable: Any = cls
    module.__class__ = _marked_class(hashable) if _is_marked(module) else cls


def mark(module: nn.Module) -> None:
    if not _is_marked(module):
        cls: Any = type(module)
        module.__class__ = _marked_class(cls)


def unmark(module: nn.Module) -> None:
    module.__class__ = unmarked_class(module)


# Layers that read a weight through an operation


def child_name(parameter: str) -> str:
    """The child of a layer that holds the operation on one of its parameters.

    >>> child_name("in_proj_weight")
    'in_proj_weight_edit'
    """
    return f"{parameter}_edit"


def edited_weights(layer: nn.Module) -> tuple[str, ...]:
    """The parameters that a layer reads through an operation."""
    return getattr(type(layer), "_edited_weights", ())


def read_through(layer: nn.Module, parameter: str) -> None:
    """Let a layer read a parameter through its child; the child must be there already."""
    names = tuple(sorted({*edited_weights(layer), parameter}))
    read_plainly(layer)
    set_class(layer, _edited_class(cast(Any, unmarked_class(layer)), names))


def read_plainly(layer: nn.Module) -> None:
    """Undo :func:`read_through` for all parameters of a layer."""
    if edited_weights(layer):
        set_class(layer, vars(unmarked_class(layer))["_made_by"][1])


def quantised(weight: Tensor) -> str:
    """In words, that a weight is quantised and cannot be computed with; empty for a plain one."""
    cls = type(weight)
    # Quantised weights are of classes of their own, some of which say that they are of floats.
    if weight.is_floating_point() and (cls is nn.Parameter or cls.__module__.partition(".")[0] == "torch"):
        return ""
    return f"is quantised ({cls.__name__} of {str(weight.dtype).removeprefix('torch.')})"


def _reader(parameter: str) -> property:
    child = child_name(parameter)

    def read(self: nn.Module) -> Any:
        weight = cast(Tensor, self._parameters[parameter])
        if type(weight) is not nn.Parameter and (reason := quantised(weight)):
            raise TypeError(
                f"expected a plain {parameter} under an edit of it, got a {type(self).__name__} where it "
                f"{reason}; call wp.fold(model) before you quantise."
            )
        value = cast(Any, self._modules[child])(weight)
        if isinstance(value, Proxy):
            # The program would ask the layer for its weight, get f(W), and apply f again.
            raise TypeError(
                f"expected layers that use their edited weights themselves, got a {type(self).__name__} "
                f"whose {parameter} is used from outside, which torch.fx cannot follow; wp.fold(model) "
                "writes the edit into the weights, or use torch.export.export."
            )
        return value

    return property(read)


@functools.cache
def _edited_class(base: Any, names: tuple[str, ...]) -> type[nn.Module]:
    members = {name: _reader(name) for name in names}
    return subclass(_edited_class, base, names, members={**members, "_edited_weights": names})


# The query of nn.MultiheadAttention


class PackedQueryAttention(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` whose packed projection goes through ``inserted_query``."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if query.is_nested:
            raise TypeError(
                "expected a plain tensor of tokens, got a nested one; make the nn.TransformerEncoder with "
                "enable_nested_tensor=False."
            )
        through = cast(Any, self.inserted_query)
        tokens_first = self.batch_first and query.ndim == 3
        if tokens_first:
            # The function multiplies once where query, key and value are one tensor.
            q = query.transpose(0, 1)
            k = q if key is query else key.transpose(0, 1)
            v = q if value is query else k if value is key else value.transpose(0, 1)
            query, key, value = q, k, v
        out, weights = functional.multi_head_attention_forward(
            query,
            key,
            value,
            self.embed_dim,
            self.num_heads,
            through(self.in_proj_weight.mT).mT,
            None if self.in_proj_bias is None else through(self.in_proj_bias),
            self.bias_k,
            self.bias_v,
            self.add_zero_attn,
            self.dropout,
            self.out_proj.weight,
            self.out_proj.bias,
            training=self.training,
            key_padding_mask=key_padding_mask,
            need_weights=need_weights,
            attn_mask=attn_mask,
            average_attn_weights=average_attn_weights,
            is_causal=is_causal,
        )
        return out.transpose(0, 1) if tokens_first else out, weights


def no_packed_query(attention: nn.MultiheadAttention) -> str:
    """Why its queries alone do not decide its weights, or cannot be reached; empty where they do and can."""
    if unmarked_class(attention) not in (nn.MultiheadAttention, PackedQueryAttention):
        return f"{type(attention).__name__} is a subclass of nn.MultiheadAttention, and may compute otherwise"
    if attention.in_proj_weight is None:
        return "its keys or values have another width than its queries (kdim, vdim)"
    if attention.bias_k is not None or attention.add_zero_attn:
        return "it attends to one token more than there are (add_bias_kv, add_zero_attn)"
    return ""


def open_packed_query(attention: nn.Module) -> None:
    """The child ``inserted_query`` must be there already."""
    set_class(attention, PackedQueryAttention)
    attention.__module__ = nn.MultiheadAttention.__module__  # torch.fx calls torch's own layers as a whole
    attention.register_forward_pre_hook(stay_unfused)


def close_packed_query(module: nn.Module) -> None:
    """Undo :func:`open_packed_query`; leaves other modules alone."""
    if unmarked_class(module) is PackedQueryAttention:
        set_class(module, nn.MultiheadAttention)
        vars(module).pop("__module__", None)
        for key in [key for key, hook in module._forward_pre_hooks.items() if hook is stay_unfused]:
            del module._forward_pre_hooks[key]


def stay_unfused(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Forward pre-hook that does nothing: ``nn.TransformerEncoderLayer`` fuses attention without hooks."""


# Layers that peft has wrapped: an adapted layer calls its ``base_layer`` and adds something of its own

BASE = "base_layer"


def is_adapted(module: nn.Module) -> bool:
    """Whether a module is a layer of peft around another one."""
    return hasattr(type(module), "get_base_layer")


def inner(module: nn.Module) -> nn.Module:
    """The layer inside an adapted one; another module is its own."""
    while is_adapted(module) and isinstance(wrapped := getattr(module, BASE, None), nn.Module):
        module = wrapped
    return module


def original(module: nn.Module) -> nn.Module:
    """A module of which peft trains a copy (``modules_to_save``); another one is its own."""
    kept = module._modules.get("original_module")
    return module if kept is None else kept
