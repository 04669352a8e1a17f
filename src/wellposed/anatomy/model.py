"""What a model is made of: its blocks and its patch embedding."""

from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from wellposed.anatomy.example import LIBRARIES, examples_of
from wellposed.anatomy.find import refused_row
from wellposed.anatomy.loops import encoder_of
from wellposed.anatomy.places import IN_PIECES
from wellposed.anatomy.proof import (
    is_quiet,
    of_edits,
    own_class,
    proofs,
    prove,
    proven_embeddings,
    proven_row,
    remember_loops,
    splits_images,
    version_of,
)
from wellposed.anatomy.subclass import inner
from wellposed.anatomy.table import (
    BLOCKS,
    BlockRow,
    EmbeddingRow,
    Layout,
    Position,
    Side,
    Tap,
    block_row,
    embedding_row,
)
from wellposed.errors import SeamError, UnknownModelError, WrappedModelError

BlockSelection = int | slice | Iterable[int] | None
_ATTENTION_NAMES = ("attn", "attention", "self_attention", "self_attn")


@dataclass(frozen=True)
class Place:
    """A tap found in a model: before or after the submodule ``name``."""

    name: str
    owner: nn.Module
    side: Side
    layout: Layout


@dataclass(frozen=True)
class Block:
    """A transformer block found in a model."""

    index: int
    name: str
    module: nn.Module
    row: BlockRow

    def place(self, position: Position) -> Place | str:
        """Where ``position`` is in this block, or why it has none."""
        tap = self.row.tap(position)
        return tap if isinstance(tap, str) else find_place(self.name, self.module, tap, self._layout())

    def attention(self) -> tuple[str, nn.Module]:
        """The attention module and its name. Raises ValueError where there is none."""
        for name in _ATTENTION_NAMES:
            if isinstance(child := getattr(self.module, name, None), nn.Module):
                return join_names(self.name, name), child
        place = self.place("attention.end")
        if isinstance(place, str):
            raise ValueError(f"{self.name} has no module that is its attention: {place}.")
        return place.name, place.owner

    def _layout(self) -> Layout:
        return self.row.layout_of(self.module)


@dataclass(frozen=True)
class Embedding:
    """A patch embedding found in a model."""

    name: str
    module: nn.Module
    row: EmbeddingRow

    def tokens(self) -> Place:
        return find_place(self.name, self.module, self.row.tokens, self.row.layout_of(self.module))

    def patch_convolution(self) -> tuple[str, nn.Conv2d] | str:
        """The convolution that reads the patches and its name, or why there is none."""
        if self.row.patch_convolution is None:
            return self.row.no_pixels
        found = self.module.get_submodule(self.row.patch_convolution)
        convolution = inner(found)
        if not isinstance(convolution, nn.Conv2d):
            return f"it embeds patches with a {type(convolution).__name__}, not a convolution"
        is_patchwise = (
            convolution.kernel_size == convolution.stride
            and convolution.padding in ((0, 0), "valid")
            and convolution.dilation == (1, 1)
        )
        if not is_patchwise:
            return (
                f"its patch convolution overlaps (kernel {convolution.kernel_size}, "
                f"stride {convolution.stride}), there is no pixel-patch matrix"
            )
        return join_names(self.name, self.row.patch_convolution), cast(nn.Conv2d, found)


def blocks(model: nn.Module, example: Any = None) -> list[Block]:
    """All blocks of a model, in the order of its modules.

    The index runs through all stages, and through a decoder after its encoder. Blocks of which nothing is
    known yet are found by running the model once on an example, and proven by a second run (see
    :mod:`wellposed.anatomy.proof`). A block that was seen and cannot be edited is among them: its row says
    why.

    Args:
        example: what to run the model on if it must be run: a tensor, a dict of keyword arguments or a tuple
            of arguments. None makes one for models of timm, transformers and torchvision.

    Raises :class:`~wellposed.errors.UnknownModelError` where there is none.
    """
    rows, unknown = _known(model, ran=example is not None)
    seen = "No run would show one: its classes are torch's own, or were seen to add no skips."
    if unknown:
        if any(parameter.is_meta for parameter in model.parameters()):
            _refuse_meta(model, rows, unknown)
        else:
            rows, seen = _found(model, example, rows)
    if not rows:
        raise unknown_model(model, seen)
    return [Block(index, *found) for index, found in enumerate(rows)]


def families() -> list[str]:
    """The families that are known without a run: those of the table, and those that were proven."""
    rows = [*BLOCKS.values(), *proofs().rows.values()]
    return sorted({row.family for row in rows if not row.refused})


GIVE_EXAMPLE = (
    "A model of one's own is run once to find its blocks: give an input as example=, such as\n"
    "    wp.remove_skips(model, example=torch.randn(1, 3, 224, 224))"
)


def unknown_model(model: nn.Module, seen: str) -> UnknownModelError:
    """The error for a model without a known block.

    Args:
        seen: what a run has shown instead, or how to make one.
    """
    cls = type(model)
    block = _repeated_class(model)
    twin = timm_twin(cls)
    return UnknownModelError(
        f"found no transformer block in {cls.__name__}.\n{seen}\n"
        + (f"{twin}\n" if twin else "")
        + f"Known without a run: {'; '.join(families())}.\n"
        + (f"The class to teach may be {block}, which is repeated in it.\n" if block else "")
        + "Teach it a class whose blocks a run does not show, with the adds of its forward in order:\n"
        "    from wellposed.anatomy import Add, BlockRow, after, taps, teach, verify\n"
        "    teach(MyBlock, BlockRow('mine', adds=(Add('attention', skip='x'), Add('ffn', skip='x')),\n"
        "                            taps=taps(attention=after('attn'), mlp='mlp', last_linear='mlp.fc2')))\n"
        "    verify(model, images)"
    )


def timm_twin(cls: type) -> str:
    """In words, what timm has of the same kind as a class of another library or one's own; empty if nothing.

    >>> class DinoVisionTransformer: pass
    >>> timm_twin(DinoVisionTransformer).partition(";")[0]
    'timm has models of this kind in timm.models.vision_transformer'
    """
    import timm  # this is for an error: nothing else here needs it

    library, *inside = cls.__module__.split(".")
    if library == "timm":
        return ""
    own = cls.__name__.casefold()
    homes = {
        name.casefold(): made.__module__.rpartition(".")[2]
        for name, made in vars(timm.models).items()
        if isinstance(made, type) and issubclass(made, nn.Module)
    }
    alike = [name for name in homes if own == name or (len(name) > 8 and own.endswith(name))]
    home = homes[max(alike, key=len)] if alike else None
    if home is None and library in ("transformers", "torchvision") and inside[1:]:
        there = timm.list_modules()
        home = next((m for m in there if m == inside[1] or m.startswith(f"{inside[1]}_")), None)
    names = [name for name in timm.list_models(module=home) if not name.startswith("test_")] if home else []
    if not names:
        return ""
    return f"timm has models of this kind in timm.models.{home}; try one, such as {min(names, key=len)}."


def _repeated_class(model: nn.Module) -> str:
    """The class of parts that are repeated most in lists of a model's modules; empty if there is none."""
    counts: dict[str, int] = {}
    for module in model.modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            for child in module:
                name, home = type(child).__name__, type(child).__module__
                if next(child.children(), None) is not None and not home.startswith("torch."):
                    counts[name] = counts.get(name, 0) + 1
    most = max(counts, key=lambda each: counts[each], default="")
    return most if counts.get(most, 0) > 1 else ""


def refusal(found: list[Block]) -> SeamError:
    """The error for blocks that were seen and can be neither edited nor measured."""
    reasons = {type(block.module): block.row.refused for block in found}
    said = "; ".join(f"{cls.__name__}{version_of(cls)}: {why.rstrip('.')}" for cls, why in reasons.items())
    other = ", or install a version that is tested" if any(map(version_of, reasons)) else ""
    return SeamError(
        f"{found[0].name}{f' and {len(found) - 1} more' if len(found) > 1 else ''} cannot be edited. {said}. "
        f"Describe {' and '.join(cls.__name__ for cls in reasons)} with wellposed.anatomy.teach{other}. "
        f"{timm_twin(type(found[0].module))}".rstrip()
    )


def is_settled(model: nn.Module) -> bool:
    """Whether the blocks of a model are known without running it."""
    return not _known(model)[1]


_Rows = list[tuple[str, nn.Module, BlockRow]]


def _known(model: nn.Module, *, ran: bool = False) -> tuple[_Rows, list[nn.Module]]:
    """The blocks that are known without a run, and the modules that may be others or hold some.

    With ``ran=True`` parts that no run has reached yet may hold others.
    """
    rows: _Rows = []
    others: list[nn.Module] = []
    splitters: dict[str, str] = {}
    edits = of_edits(model)
    for name, module in model.named_modules():
        if id(module) in edits:
            continue
        remember_loops(module)
        row = block_row(module) or proven_row(module)
        if row is not None and any(_shares_joins(outer, name, module) for outer in rows):
            row = None  # a part of a block, which is a block itself where it stands alone
        around = next((part for part in splitters if name.startswith(part)), None)
        if row is not None and around is not None:
            why = splitters[around] or row.refused
            row = refused_row(module, why) if why else row.in_pieces(IN_PIECES)
        elif row is not None and row.pieces:  # known from elsewhere, where images were cut
            row = None
        if row is not None:
            rows.append((name, module, row))
        elif (why_not := splits_images(module)) is not None:
            splitters[f"{name}." if name else ""] = why_not
        else:
            others.append(module)
    # By identity: what several blocks share may be named outside of them (CoaT's position encodings).
    within = {id(part) for _, block, _ in rows for part in block.modules()}
    unknown = [module for module in others if id(module) not in within]
    return rows, [m for m in unknown if encoder_of(m) is not None or not is_quiet(m, ran=ran)]


def _shares_joins(outer: tuple[str, nn.Module, BlockRow], name: str, module: nn.Module) -> bool:
    """Whether a module holds joins of a block around it."""
    outer_name, block, row = outer
    if outer_name and not name.startswith(f"{outer_name}."):
        return False
    owners = {id(block.get_submodule(add.site.path)) for add in row.adds if add.site}
    return any(id(part) in owners for part in module.modules())


def _refuse_meta(model: nn.Module, known: _Rows, unknown: list[nn.Module]) -> None:
    """Raise where a model without data has parts that only a run could tell of.

    What is around a known model is left to its owner, as it is on any device.
    """
    classes = {own_class(module) for module in unknown}
    doubtful = {cls for cls in classes if cls.__module__.partition(".")[0] in LIBRARIES}
    if not known or doubtful:
        names = ", ".join(sorted(f"{cls.__name__}{version_of(cls)}" for cls in doubtful or classes))
        raise _not_on_meta(model, f"blocks, and holds what is not known without a run: {names}")


def _not_on_meta(model: nn.Module, what: str) -> UnknownModelError:
    return UnknownModelError(
        f"{type(model).__name__} is on the meta device, where it cannot be run to find its {what}. Edit it "
        "on another device, or edit a small model of the same classes first: what was found is kept for this "
        "process."
    )


def _found(model: nn.Module, example: Any, known: _Rows) -> tuple[_Rows, str]:
    """The blocks after a run of the model, and for an error what it has shown, or why there was none."""
    runs = examples_of(model, example)
    if not runs:
        return known, GIVE_EXAMPLE
    seen = []
    for _, part, one in runs:
        try:
            seen.append(f"A run of {type(part).__name__} showed {prove(part, one)}.")
        except SeamError:
            raise
        except Exception as error:
            if example is not None:
                raise
            trouble = f"{type(part).__name__} could not be run on an example: {error}"
            sharded = any(isinstance(module, FSDPModule) for module in model.modules())
            if known and not sharded:  # an edit of these alone might be half of one
                raise UnknownModelError(
                    f"{len(known)} blocks of {type(model).__name__} are known, but not whether there are "
                    f"others: {trouble}\nGive an input of the model as example=."
                ) from error
            return known, f"{trouble}\n{GIVE_EXAMPLE}"
    return _known(model)[0], "\n".join(seen)


def plain_numbers(given: int | Iterable[int]) -> int | list[int]:
    """One number or several, those of NumPy as Python's."""
    if isinstance(given, int):
        return given
    if isinstance(given, Integral):
        return int(given)
    return [
        int(each) if isinstance(each, Integral) and not isinstance(each, bool) else each for each in given
    ]


def select(found: list[Block], selection: BlockSelection) -> list[Block]:
    """The blocks that ``blocks=`` names: an index, a slice, several indices, or None for all."""
    if selection is None:
        return found
    if isinstance(selection, slice):
        chosen = found[selection]
    else:
        given = plain_numbers(selection)
        indices = [given] if isinstance(given, int) else given
        for index in indices:
            if not isinstance(index, int) or isinstance(index, bool):
                raise TypeError(
                    f"blocks must be an index, a slice or several indices, got {index!r}; "
                    "blocks=[0, 1] and blocks=slice(0, 6) are examples."
                )
            if not -len(found) <= index < len(found):
                raise IndexError(
                    f"blocks must be within 0 and {len(found) - 1}, got {index}; "
                    f"the model has {len(found)} blocks, from {found[0].name} to {found[-1].name}."
                )
        chosen = [found[index] for index in sorted({index % len(found) for index in indices})]
    if not chosen:
        raise ValueError(f"blocks={selection!r} selects none of the {len(found)} blocks; None selects all.")
    return chosen


def no_attention(block: Block) -> str:
    """Why a block has no attention over tokens; empty where it has."""
    if block.row.no_token_attention or {"attention", "parallel"} & set(block.row.roles):
        return block.row.no_token_attention
    tap = block.row.tap("attention.end")
    return tap if isinstance(tap, str) else "its row names no skip around attention"


def embeddings(model: nn.Module, example: Any = None) -> list[Embedding]:
    """The patch embeddings of a model. Raises where a run shows none."""
    blocks(model, example)  # an unknown model gets the error about models
    found = _taught_embeddings(model) or _proven_embeddings(model)
    if not found:
        # Its blocks were known, so that it was not run yet.
        for _, part, one in examples_of(model, example):
            prove(part, one)
        found = _proven_embeddings(model)
    if not found and any(parameter.is_meta for parameter in model.parameters()):
        raise _not_on_meta(model, "patch embedding")
    if not found:
        raise ValueError(
            f"found no patch embedding that wellposed knows in {type(model).__name__}; "
            'gray the input of a block instead (where="blocks", blocks=0), or describe it with '
            "wellposed.anatomy.teach(MyPatchEmbedding, EmbeddingRow(...))."
        )
    return found


def _taught_embeddings(model: nn.Module) -> list[Embedding]:
    found = ((name, module, embedding_row(module)) for name, module in model.named_modules())
    return [Embedding(name, module, row) for name, module, row in found if row is not None]


def _proven_embeddings(model: nn.Module) -> list[Embedding]:
    """Those of the outermost parts of a model that were run."""
    found: list[Embedding] = []
    for name, module in model.named_modules():
        if not any(not known.name or name.startswith(f"{known.name}.") for known in found):
            found += [Embedding(name, module, row) for row in proven_embeddings(module)]
    return found


def refuse_wrapped(model: nn.Module) -> None:
    """Raise if the model, or a part of it, is compiled, sharded or replicated already."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}.")
    inner = "make the edit first and wrap the edited model then"
    for name, module in model.named_modules():
        if isinstance(module, (DistributedDataParallel, DataParallel, FullyShardedDataParallel)):
            how, remedy = f"wrapped in {type(module).__name__}", inner
        elif isinstance(module, FSDPModule):
            how, remedy = "sharded by fully_shard", "edit it before fully_shard"
        elif "_orig_mod" in module._modules or module._compiled_call_impl is not None:
            how, remedy = "compiled", "edit it before torch.compile: compiled code would not see the edit"
        elif isinstance(module, torch.jit.ScriptModule):
            how, remedy = "TorchScript", "edit the Python model it was made from"
        else:
            continue
        part = f"its part {name!r}" if name else "the model"
        raise WrappedModelError(f"expected a plain model, but {part} is {how}; {remedy}.")


def find_place(name: str, module: nn.Module, tap: Tap, layout: Layout) -> Place:
    for path in tap.paths:
        try:
            owner = module.get_submodule(path)
        except AttributeError:
            continue
        if isinstance(owner, (nn.Sequential, nn.ModuleList)) and encoder_of(owner) is None:
            raise ValueError(
                f"{join_names(name, path)} is a {type(owner).__name__}, to which no operation can be added; "
                "name its first or last element in the row."
            )
        return Place(join_names(name, path), owner, tap.side, tap.layout or layout)
    raise ValueError(
        f"expected a submodule {' or '.join(map(repr, tap.paths))} in {name} ({type(module).__name__}), "
        f"found {', '.join(child for child, _ in module.named_children())}; the row in wellposed.anatomy "
        "does not fit this model, describe it with wellposed.anatomy.teach."
    )


def join_names(*parts: str) -> str:
    return ".".join(part for part in parts if part)
