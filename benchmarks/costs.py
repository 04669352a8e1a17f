"""What the measurements and an edited model cost, compared with the plain way.

python -m benchmarks diagnose [--out FILE.csv]
python -m benchmarks unused-edits [--rounds 41] [--out FILE.csv]
python -m benchmarks edits [--rounds 21] [--out FILE.csv]
"""

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import timm
import torch
from torch import Tensor, nn

import wellposed as wp
from benchmarks.graying_steps import bare_step, in_turn
from benchmarks.timing import in_turns, quartiles, seconds, usual_device, where, write
from wellposed.anatomy import blocks
from wellposed.anatomy.seam import open_seam
from wellposed.linalg import condition_number
from wellposed.probes import Monitor, jacobian_spectrum
from wellposed.probes.attention_maps import watching_attention
from wellposed.probes.observe import observed
from wellposed.probes.subblock import sub_block
from wellposed.train.recipe import Recipe

TITLES = ["what", "size", "seconds", "quartile 1", "quartile 3", "against", "seconds", "ratio", "n"]


class Report:
    """Rows as they come, printed and kept."""

    def __init__(self) -> None:
        self.rows: list[list[object]] = []

    def add(
        self,
        what: str,
        size: str,
        ours: Callable[[], object],
        against: str = "",
        other: Callable[[], object] | None = None,
        rounds: int = 5,
        warm: bool = True,
    ) -> None:
        if warm:
            ours()
            if other is not None:
                other()
        pairs = in_turns(lambda: seconds(other) if other else float("nan"), lambda: seconds(ours), rounds)
        low, middle, high = quartiles([b for _, b in pairs])
        row: list[object] = [what, size, f"{middle:.4g}", f"{low:.4g}", f"{high:.4g}", against]
        if other is not None:
            _, plain, _ = quartiles([a for a, _ in pairs])
            _, ratio, _ = quartiles([b / a for a, b in pairs])
            row += [f"{plain:.4g}", f"{ratio:.4g}"]
        else:
            row += ["", ""]
        self.rows.append([*row, rounds])
        print(*self.rows[-1], sep="  ", flush=True)


def read_eager_attention(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The plain way to the maps: unfused attention for every image, entropies from its softmax."""
    entropies: list[Tensor] = []
    was_fused = [module for module in model.modules() if getattr(module, "fused_attn", False)]
    for module in was_fused:
        module.fused_attn = False
    try:
        with observed(model) as found, torch.no_grad():
            see = lambda _, p: entropies.append(torch.special.entr(p).sum(-1).mean((1, 3)))  # noqa: E731
            with watching_attention(found, see, x.shape[0]):
                model(x)
    finally:
        for module in was_fused:
            module.fused_attn = True
    return entropies


def dense_singular_values(model: nn.Module, image: Tensor) -> Tensor:
    cut = sub_block(model, image, 0, "attention", skip=True, dtype=torch.float32)
    jacobian = torch.func.jacrev(cut.function, chunk_size=64)(cut.input)
    return torch.linalg.svdvals(jacobian.reshape(cut.input.numel(), -1))


def forward(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(x)
    return out


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model.train()
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def diagnose(
    out: Path | None = None,
) -> None:
    """What the measurements cost, compared with the plain way of getting the same numbers.

    On a GPU and on a CPU alike: the condition number against ``torch.linalg.cond``, kappa and density of a
    whole model against a forward pass and against eager attention whose maps are read, extreme singular
    values of an attention Jacobian against the dense one, and the monitor against training steps.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    print(where(), *TITLES, sep="  ")
    report = Report()
    small = device == "cpu"

    shape = (32, 197, 192) if small else (256, 197, 768)
    tokens = torch.randn(shape, device=device)
    size = " x ".join(map(str, shape))
    report.add(
        "kappa",
        size,
        lambda: condition_number(tokens),
        "torch.linalg.cond",
        lambda: torch.linalg.cond(tokens),
    )

    name, count = ("vit_tiny_patch16_224", 16) if small else ("vit_base_patch16_224", 64)
    model = timm.create_model(name).to(device).eval()
    x = torch.randn(count, 3, 224, 224, device=device)
    size = f"{name}, {count} images"
    batch = {"batch_size": count}
    report.add("diagnose", size, lambda: wp.diagnose(model, x, **batch), "forward", lambda: forward(model, x))
    report.add(
        "diagnose, density of all images",
        size,
        lambda: wp.diagnose(model, x, attention_images=count, **batch),
        "forward",
        lambda: forward(model, x),
    )
    report.add(
        "density of 2 images",
        size,
        lambda: wp.diagnose(model, x, what="density", attention_images=2, **batch),
        "eager attention, entropies read",
        lambda: read_eager_attention(model, x),
    )

    few = timm.create_model("vit_tiny_patch16_224", img_size=80, depth=1).to(device).eval()  # 26 x 192 tokens
    image = torch.randn(1, 3, 80, 80, device=device)
    report.add(
        "ten extreme singular values, attention with skip",
        "4,992 x 4,992",
        lambda: jacobian_spectrum(few, image, skip=True, max_steps=1000),
        "torch.func.jacrev and svdvals",
        lambda: dense_singular_values(few, image),
        rounds=1,
        warm=not small,
    )
    base = timm.create_model("vit_base_patch16_224", depth=1).to(device).eval()
    for skip in (False, True):
        report.add(
            f"ten extreme singular values, attention {'with' if skip else 'without'} skip",
            "151,296 x 151,296",
            lambda skip=skip: jacobian_spectrum(base, x[:1], skip=skip),
            rounds=1 if small else 3,
            warm=not small,
        )
        for record in jacobian_spectrum(base, x[:1], skip=skip).records():
            print("   ", record.measure, record.text(), record.note)

    vit, size = timm.create_model(name, num_classes=10).to(device), 8 if small else 64
    labels = torch.randint(10, (size,), device=device)
    monitor = Monitor(vit, x)
    report.add(
        "one measurement of the monitor, due every 100 steps",
        f"{name}, {len(monitor.images)} images",
        monitor.measure,
        f"10 training steps of batch {size}",
        lambda: train(vit, x[:size], labels, 10),
    )
    if out:
        write(out, "medians; ratio is ours / the other, of each round", TITLES, report.rows)


def seamed(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    for block in blocks(model):
        open_seam(block.module, block.row)
    return model


def stepper(model: nn.Module, x: torch.Tensor, mode: str, repeats: int) -> Callable[[], float]:
    """A function that runs the model ``repeats`` times and returns the seconds."""
    compiled = torch.compile(model, fullgraph=True) if "compiled" in mode else model
    autocast = torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda)

    def once() -> None:
        if "train" in mode:
            with autocast:
                loss = compiled(x).float().square().mean()
            loss.backward()
        else:
            with torch.inference_mode(), autocast:
                compiled(x)

    for _ in range(3):
        once()
    return lambda: seconds(lambda: [once() for _ in range(repeats)])


def unused_edits(
    rounds: int = 41,
    out: Path | None = None,
) -> None:
    """What an opened seam costs while every skip is kept and nothing is inserted.

    A model and its seamed copy take turns in one process; the ratio is of each pair.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = (
        [
            ("vit_base_patch16_224", "train compiled", 256, 1),
            ("vit_base_patch16_224", "train eager", 256, 1),
            ("vit_base_patch16_224", "forward eager", 64, 4),
            ("vit_tiny_patch16_224", "forward eager", 1, 20),
        ]
        if device == "cuda"
        else [
            ("vit_tiny_patch16_224", "forward eager", 1, 5),
            ("vit_tiny_patch16_224", "forward eager", 8, 1),
            ("vit_tiny_patch16_224", "train eager", 8, 1),
        ]
    )
    rows: list[list[object]] = []
    for name, mode, batch, repeats in settings:
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = timm.create_model(name).to(device)
        x = torch.randn(batch, 3, 224, 224, device=device)
        steps = [stepper(each, x, mode, repeats) for each in (model, model, seamed(model))]
        # The model against itself shows what the measurement can tell.
        for against, other in (("itself", steps[1]), ("seamed", steps[2])):
            pairs = in_turns(steps[0], other, rounds)
            low, middle, high = quartiles([b / a for a, b in pairs])
            rows.append([name, mode, batch, against, f"{middle:.4f}", f"{low:.4f}", f"{high:.4f}"])
            print(*rows[-1], sep="  ", flush=True)
    if out:
        titles = ["model", "mode", "batch", "against", "ratio median", "quartile 1", "quartile 3"]
        write(out, f"{rounds} rounds, alternating", titles, rows)


COSTED: dict[str, dict[str, object]] = {
    "gray_tokens": {"edit": "gray_tokens"},
    "gray_tokens dct": {"edit": "gray_tokens", "method": "dct"},
    "gray_tokens condition": {"edit": "gray_tokens", "method": "condition"},
    "broadcast_context": {"edit": "broadcast_context"},
    "broadcast_context scaled": {"edit": "broadcast_context", "scaled": True},
    "FeatScale": {
        "edit": "broadcast_context",
        "where": "attention.end",
        "mean": 1.0,
        "difference": 1.0,
        "learned": True,
    },
    "condition_weights": {"edit": "condition_weights"},
    "condition_weights exact": {"edit": "condition_weights", "strength": "exact"},
    "normalise_spectrum": {"edit": "normalise_spectrum"},
    "remove_skips": {"edit": "remove_skips"},
    "uniform_heads": {"edit": "uniform_heads"},
}


def edits(
    model: str = "vit_tiny_patch16_224",
    image_size: int = 224,
    batch_size: int = 8,
    rounds: int = 21,
    out: Path | None = None,
) -> None:
    """What each edit adds to a training step, and the monitor at its default pace.

    Plain and edited models take turns in one process, a step each in a round, and the ratio is of a round.
    On a CPU it is that of the time of the process, so that what else runs on the machine counts less.
    """
    device = usual_device()
    recipe = Recipe(model=model, image_size=image_size, batch_size=batch_size, precision="fp32")
    torch.manual_seed(0)
    with_edits = {name: (edit,) for name, edit in COSTED.items()}
    steps = {
        name: bare_step(replace(recipe, edits=given, compile=False), device, 1000, 3)
        for name, given in {"plain": (), "itself": (), **with_edits}.items()
    }
    calls: dict[str, Callable[[], object]] = {name: partial(step, 1) for name, step in steps.items()}
    watched = timm.create_model(model, img_size=image_size).to(device)
    images = torch.randn(batch_size, 3, image_size, image_size, device=device)
    for name, weights in (("monitor", False), ("monitor weights=True", True)):
        monitor = Monitor(watched, images, weights=weights)
        calls[name] = monitor.measure
    spent = spent_in_turns(calls, rounds, device)
    rows: list[list[object]] = []
    for name, times in list(spent.items())[1:]:
        every = monitor.every if name.startswith("monitor") else 0
        shares = [
            1 + own / plain / every if every else own / plain
            for own, plain in zip(times, spent["plain"], strict=True)
        ]
        low, middle, high = quartiles(shares)
        rows.append([model, batch_size, name, f"{middle:.4f}", f"{low:.4f}", f"{high:.4f}"])
        print(*rows[-1], sep="  ", flush=True)
    if out:
        titles = ["model", "batch", "with", "ratio median", "quartile 1", "quartile 3"]
        clock = "time of the process" if device.type == "cpu" else "time"
        comment = f"{rounds} rounds in turns, {clock}; the monitor measures every {monitor.every} steps"
        write(out, comment, titles, rows)


def spent_in_turns(
    calls: Mapping[str, Callable[[], object]], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Seconds of each call in each round, after one round that does not count."""
    for call in calls.values():
        call()
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(rounds):
        for name in in_turn(list(calls), index):
            spent[name].append(_spent(calls[name], device))
    return spent


def _spent(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call: of the process on a CPU, which does not count what else runs there."""
    if device.type != "cpu":
        return seconds(call)
    before = time.process_time()
    call()
    return time.process_time() - before
