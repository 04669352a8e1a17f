"""Models by name, and their weights from files that cannot run code.

A plain name is timm's, and so are ``hf-hub:NAME`` and ``local-dir:FOLDER``. ``hf:NAME`` is transformers' (a
folder with a config.json, or a name on the hub) and ``tv:NAME`` torchvision's.

>>> model = build("vit_tiny_patch16_224", depth=2, img_size=32)
>>> describe_weights(model)
'random weights (seed 0)'
"""

import importlib
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import timm
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

import wellposed.convmixer_tiny  # noqa: F401  registers a model with timm
from wellposed.files import read_object
from wellposed.probes.model_input import is_of
from wellposed.probes.observe import plain
from wellposed.saving import KEY, apply, is_of_edits, lacks, saved_edits
from wellposed.surgery import edits
from wellposed.surgery.insertion import scales
from wellposed.text import close_names, few
from wellposed.weights import HELD, INDEX, from_file, misfits, read_weights, renamed, share_tied, unreadable

_described: "WeakKeyDictionary[nn.Module, str]" = WeakKeyDictionary()
_random: "WeakSet[nn.Module]" = WeakSet()

_LOADS = "it can name what to load, and a file of weights can run code; weights= takes a file that is safe"
_REFUSED_OPTIONS = {
    "checkpoint_path": _LOADS,
    "pretrained_cfg": _LOADS,
    "pretrained_cfg_overlay": _LOADS,
    "cache_dir": "the environment variable HF_HOME says where downloads are kept",
    "trust_remote_code": "code that comes with weights is never run",
    "device": "models are built on the CPU, where equal seeds give equal weights; use .to(device) afterwards",
}
_LOADED = (".pth", ".pt", ".tar", ".bin", ".ckpt", ".pkl", ".pickle", ".npz", ".npy", ".safetensors", ".py")
"""Endings of files that libraries load."""


def build(
    name: str,
    *,
    weights: str | Path | None = None,
    pretrained: bool | None = None,
    seed: int = 0,
    **options: Any,
) -> nn.Module:
    """A model in evaluation mode, with the edits that :func:`wellposed.save_edits` put in its folder or with
    its file of weights.

    Args:
        name: of timm, ``hf-hub:NAME`` or ``local-dir:FOLDER`` as timm has them, ``hf:NAME_OR_FOLDER`` of
            transformers, or ``tv:NAME``.
        weights: a .safetensors, .pth, .pt, .bin or .ckpt file, see :func:`load_weights`.
        pretrained: the library's own weights, or those of the folder. None is the weights of a folder that
            holds some, and random ones elsewhere.
        seed: of random weights. The state of the global generators stays as it is.
        options: for the library: ``num_classes``, ``img_size``, ...; for transformers, of its configuration.
    """
    if weights is not None and pretrained:
        raise ValueError("expected weights= or pretrained=True, got both; leave one of them out.")
    _check_options(options)
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be at least 0 and below 2**63, got {seed}.")
    prefix, colon, rest = name.partition(":")
    if prefix == "hf" and weights is None and pretrained is not False:
        weights = _pickled_in(Path(rest).expanduser())
    builders: dict[str, _Builder] = {
        "hf": _build_transformers,
        "tv": _build_torchvision,
        "hf-hub": _build_of_hub,
        "local-dir": _build_of_folder,
    }
    if colon and prefix not in builders:
        raise ValueError(
            "expected a name of timm, hf-hub:NAME or local-dir:FOLDER (timm's too), hf:NAME (transformers) "
            f"or tv:NAME (torchvision), got {name!r}."
        )
    builder, own_name = (builders[prefix], rest) if colon else (_build_timm, name)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        is_fresh = weights is not None or pretrained is False
        model, described = builder(own_name, bool(pretrained), is_fresh, options)
    say_weights(model, described or f"random weights (seed {seed})")
    if not described:
        _random.add(model)
    if weights is not None:
        if (edited := saved_edits(weights)) is not None and not edits(model):
            apply(model, edited.to_dict())
        load_weights(model, weights)
    return model.eval()


def _check_options(options: Mapping[str, Any]) -> None:
    for option, remedy in _REFUSED_OPTIONS.items():
        if option in options:
            raise ValueError(f"{option}= is no option of build: {remedy}.")
    for option, value in options.items():
        _refuse_places(option, value)


def _refuse_places(option: str, value: Any) -> None:
    """Refuse what names a file or an address: libraries load it, and some of them run the code in it."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            _refuse_places(f"{option}.{key}", each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            _refuse_places(option, each)
    elif isinstance(value, os.PathLike) or (isinstance(value, str) and _is_place(value)):
        raise ValueError(
            f"expected numbers and words as options of a model, got {option}={str(value)!r}, which names a "
            "file or an address that would be loaded; leave it out. weights= takes a file of weights."
        )


def _is_place(text: str) -> bool:
    return any(mark in text for mark in ("/", "\\", ":")) or Path(text).suffix.lower() in _LOADED


def describe_weights(model: nn.Module) -> str:
    """Where the weights are from, for a report, so far as :func:`build` and :func:`load_weights` know.

    What was done to them since, by training say, is not known here.
    """
    return _described.get(plain(model), "weights as they were given")


def has_random_weights(model: nn.Module) -> bool:
    """Whether :func:`build` drew the weights, and no file was loaded since."""
    return plain(model) in _random


def say_weights(model: nn.Module, words: str) -> None:
    """Keep where a model's weights are from, for :func:`describe_weights`."""
    _described[plain(model)] = words
    _random.discard(plain(model))


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Load a file of weights that fits the model exactly; if it does not, nothing is loaded.

    Of tied parameters the file may hold one. A ``.safetensors`` file holds weights alone. Of another one,
    such as a checkpoint of timm's, what can run code is refused; the weights may lie under
    ``state_dict_ema``, ``model_ema``, ``state_dict`` or ``model``, the first of these is taken, and the
    prefixes ``module.`` and ``_orig_mod.`` are stripped. :func:`describe_weights` says so.
    """
    path = Path(path)
    state, taken = read_weights(path)
    inner = plain(model)
    share_tied(inner, state)
    wrong = misfits(inner.state_dict(), state)
    if wrong and is_of(inner, "transformers"):
        state = renamed(inner, state)
        wrong = misfits(inner.state_dict(), state)
    if wrong:
        raise ValueError(
            f"the weights in {path} do not fit {type(inner).__name__}: {'; '.join(wrong)}. "
            f"Nothing was loaded; {_remedy(inner, path, state)}"
        )
    inner.load_state_dict(state)
    words = from_file(path, taken)
    if lacking := lacks(inner, path):
        warnings.warn(f"{lacking}.", UserWarning, stacklevel=2)
        words += f"; {lacking}"
    say_weights(inner, words)


def _remedy(model: nn.Module, path: Path, state: Mapping[str, Tensor]) -> str:
    if lacking := lacks(model, path):
        return f"{lacking}."
    if any(is_of_edits(name) for name in state) and not scales(model):
        return "the file has tensors of edits, such as scales of CB_S: make the edits of its model first."
    return "build the model with the options that they were trained with (num_classes=, img_size=, ...)."


_Builder = Callable[[str, bool, bool, dict[str, Any]], tuple[nn.Module, str]]
"""(name, pretrained, whether no weights are wanted or a file comes later, options) -> (model, its weights in
words).

No words stand for random weights.
"""


def _build_timm(
    name: str, pretrained: bool, file_follows: bool, options: dict[str, Any]
) -> tuple[nn.Module, str]:
    architecture, _, tag = name.partition(".")
    if not timm.is_model(architecture) or (tag and name not in timm.list_pretrained(f"{architecture}.*")):
        raise _unknown("timm", name, [*timm.list_models(), *timm.list_pretrained()], "timm.list_models()")
    try:
        model: nn.Module = timm.create_model(name, pretrained=pretrained, **options)
    except OSError as error:
        raise _not_fetched(f"timm's weights of {name}", error) from error
    if not pretrained:
        return model, ""
    return model, f"timm's pretrained weights ({model.pretrained_cfg['tag']})"  # type: ignore[index]


_FACTS = (
    *("num_classes", "input_size", "test_input_size", "fixed_input_size", "pool_size", "first_conv", "tag"),
    *("classifier", "mean", "std", "interpolation", "crop_pct", "test_crop_pct", "crop_mode"),
)
"""What is taken of timm's configuration in a folder; the rest names files and addresses."""


def _build_of_folder(
    name: str, pretrained: bool, file_follows: bool, options: dict[str, Any]
) -> tuple[nn.Module, str]:
    """A model of timm, of a folder with a config.json; the weights that it holds are loaded."""
    folder = Path(name).expanduser()
    architecture, arguments, given = _configuration(folder)
    held = next((folder / each for each in HELD if (folder / each).is_file()), None)
    state, words = (None, "") if held is None or file_follows else read_weights(held)
    if state is None and pretrained:
        raise ValueError(f"expected {' or '.join(HELD)} in {folder}, there is neither; leave pretrained out.")
    facts = {key: given[key] for key in _FACTS if key in given}
    edited = saved_edits(folder)
    if edited is not None and state is not None:
        state = {name: value for name, value in state.items() if not is_of_edits(name)}
    try:
        model: nn.Module = timm.create_model(
            architecture,
            pretrained=state is not None,
            pretrained_cfg=facts | ({} if state is None else {"state_dict": state}),
            **{**arguments, **options},
        )
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"the weights in {held} do not fit {architecture} with these options: {reason}. Drop those "
            "that change the size of the images or patches, or load none: pretrained=False."
        ) from error
    model.pretrained_cfg.pop("state_dict", None)  # type: ignore[union-attr, operator]
    if edited is not None:
        apply(model, folder / "config.json" if state is None else folder)
    return model, "" if held is None or state is None else from_file(held, words)


def _configuration(folder: Path) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The architecture, its arguments and the pretrained_cfg of timm's config.json in a folder."""
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"expected a folder with timm's config.json, there is none in {folder}.")
    config = read_object(folder / "config.json")
    given = config.get("pretrained_cfg", config)  # older ones are flat
    arguments = config.get("model_args") or {}
    architecture = config.get("architecture")
    if not (isinstance(architecture, str) and isinstance(given, dict) and isinstance(arguments, dict)):
        raise ValueError(
            f"expected timm's architecture, model_args and pretrained_cfg in {folder}/config.json."
        )
    if not timm.is_model(architecture):
        raise _unknown("timm", architecture, timm.list_models(), "timm.list_models()")
    _check_options(arguments)
    return architecture, arguments, given | {k: config[k] for k in ("num_classes",) if k in config}


def timm_architecture(name: str) -> tuple[str, dict[str, Any]]:
    """What timm makes of a name, without its tag, and the arguments that a configuration adds.

    >>> timm_architecture("vit_tiny_patch16_224.augreg_in21k")
    ('vit_tiny_patch16_224', {})
    """
    prefix, _, rest = name.partition(":")
    if prefix == "hf-hub":
        folder = _fetched(rest, "config.json").parent
    elif prefix == "local-dir":
        folder = Path(rest).expanduser()
    else:
        return name.partition(".")[0], {}
    architecture, arguments, _ = _configuration(folder)
    return architecture, arguments


def _build_of_hub(
    name: str, pretrained: bool, file_follows: bool, options: dict[str, Any]
) -> tuple[nn.Module, str]:
    """A model of timm, of a repository on the hub; ``NAME@REVISION`` is one of its versions."""
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        folder = _fetched(name, "config.json").parent
        if pretrained:
            try:
                _fetched(name, HELD[0])
            except LocalEntryNotFoundError:
                raise  # no network
            except EntryNotFoundError:
                _fetched(name, HELD[1])
    except Exception as error:  # of the hub, of the network, of a name that is none
        raise _not_fetched(f"timm's model {name}", error, "local-dir:FOLDER") from error
    model, words = _build_of_folder(str(folder), pretrained, file_follows or not pretrained, options)
    return model, words.replace(str(folder), f"hf-hub:{name}")


def _fetched(name: str, file: str) -> Path:
    """A file of a repository on the hub."""
    from huggingface_hub import hf_hub_download

    repository, _, revision = name.partition("@")
    return Path(hf_hub_download(repository, file, revision=revision or None))


def _build_torchvision(
    name: str, pretrained: bool, file_follows: bool, options: dict[str, Any]
) -> tuple[nn.Module, str]:
    models = _library("torchvision.models", "pip install torchvision")
    if name.lower() not in models.list_models():
        raise _unknown("torchvision", name, models.list_models(), "torchvision.models.list_models()")
    model: nn.Module = models.get_model(name, weights=None, **options)
    if not pretrained:
        return model, ""
    try:
        # torchvision's own way would unpickle whatever the file holds.
        state = models.get_model_weights(name).DEFAULT.get_state_dict(progress=True, weights_only=True)
    except OSError as error:
        raise _not_fetched(f"torchvision's weights of {name}", error) from error
    if wrong := misfits(model.state_dict(), state):
        raise ValueError(f"torchvision's weights of {name} do not fit these options: {'; '.join(wrong)}.")
    model.load_state_dict(state)
    return model, "torchvision's pretrained weights"


def _build_transformers(
    name: str, pretrained: bool, file_follows: bool, options: dict[str, Any]
) -> tuple[nn.Module, str]:
    transformers = _library("transformers", "pip install 'wellposed[transformers]'")
    folder = Path(name).expanduser()
    is_local = folder.is_dir()
    if is_local:
        has_weights = _has_safetensors(folder, pretrained, file_follows)
        name = str(folder)
    elif folder.is_absolute() or name.startswith((".", "~")):
        raise FileNotFoundError(f"expected a folder with a config.json, there is no {folder}.")
    else:
        has_weights = pretrained

    safely = {"local_files_only": is_local, "trust_remote_code": False}
    try:
        config, unused = transformers.AutoConfig.from_pretrained(
            name, return_unused_kwargs=True, **safely, **options
        )
        if unused:
            raise TypeError(f"{type(config).__name__} has no option {', '.join(unused)}.")
        architecture = _architecture(transformers, config)
        if file_follows or not has_weights:
            make = transformers.AutoModel.from_config if architecture is None else architecture
            model = make(config)
            if KEY in vars(config):
                apply(model, getattr(config, KEY))
            return model, ""
        model, loaded = (architecture or transformers.AutoModel).from_pretrained(
            name,
            config=config,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are an error, below, that names them
            **safely,
        )
    except OSError as error:
        raise _not_fetched(f"the model {name}", error) from error
    except SafetensorError as error:
        raise unreadable(name, error) from error
    if KEY in vars(config):
        apply(model, folder if is_local else _fetched(name, "config.json").parent)
    return model, _loaded_words(name, model, loaded)


def _pickled_in(folder: Path) -> Path | None:
    """The weights that a folder of transformers holds as a pickle alone."""
    pickled = folder / HELD[1]
    return pickled if pickled.is_file() and not _safetensors_in(folder) else None


def _safetensors_in(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (HELD[0], INDEX))


def _has_safetensors(folder: Path, pretrained: bool, file_follows: bool) -> bool:
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"expected a config.json in {folder}; model.save_pretrained writes one.")
    if _safetensors_in(folder):
        return True
    if pretrained and not file_follows:
        raise ValueError(
            f"expected weights in {folder}, there is no model.safetensors; leave pretrained out."
        )
    return False


def _architecture(transformers: Any, config: Any) -> Any:
    """The class that the configuration names, if transformers has it."""
    named: Any = getattr(transformers, (config.architectures or [""])[0], None)
    is_model = isinstance(named, type) and issubclass(named, transformers.PreTrainedModel)
    return named if is_model and named.config_class is type(config) else None


def _loaded_words(name: str, model: nn.Module, loaded: dict[str, Any]) -> str:
    missing, reshaped = sorted(loaded["missing_keys"]), sorted(loaded["mismatched_keys"])
    if reshaped:
        shapes = [f"{key}: {tuple(held)}, not {tuple(own)}" for key, held, own in reshaped]
        raise ValueError(
            f"the weights in {name} do not fit {type(model).__name__}: {len(shapes)} of another shape "
            f"({few(shapes)}); drop the options that change them."
        )
    total = len(model.state_dict())
    if len(missing) >= total:
        raise ValueError(f"{name} holds none of the {total} tensors of {type(model).__name__}.")
    if not missing:
        return f"weights from {name}"
    return f"weights from {name}, but {len(missing)} of {total} tensors random, not in it ({few(missing)})"


def _library(name: str, install: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ImportError(f"{package} is not installed; install it with: {install}") from error


def _unknown(library: str, name: str, known: list[str], where: str) -> ValueError:
    close = close_names(name, known, most=5)
    hint = f"did you mean {', '.join(close)}? " if close else ""
    return ValueError(f"{library} has no model {name!r}; {hint}{where} lists all.")


def _not_fetched(what: str, error: Exception, folder: str = "hf:FOLDER") -> OSError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return OSError(
        f"could not get {what} ({reason}); "
        f"without a network pass a file as weights=, or a folder as {folder}."
    )
