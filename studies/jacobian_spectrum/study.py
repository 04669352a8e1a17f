"""The spectrum of one attention block's Jacobian under Token Graying of several strengths (ASA, Fig. 7, 8).

Two questions: what graying does to a model that was trained without it, weights untouched; and what the
spectrum is in models that were trained with it.
"""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from studies import compare
from studies.figures import Canvas
from studies.measures import moment_row
from studies.recipes import measured_vit
from studies.study import Records, Report, Scale, Study, Variant, data_name
from wellposed.probes import JacobianSpectrum, graying_sweep
from wellposed.probes import jacobian_spectrum as spectrum_of
from wellposed.stats import Claim
from wellposed.train import open_run
from wellposed.train.runs import Moment, TrainedRun

MEASURE = "jacobian spectrum"
EPS = (1.0, 0.9, 0.7, 0.5)
METHODS: tuple[Literal["svd", "dct"], ...] = ("svd", "dct")
PLACES: dict[Literal["blocks", "embedding"], str] = {
    "blocks": "all tokens of the block's input",
    "embedding": "the patch embedding, without the class token",
}
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)
"""Of the singular values, largest first: where the table reads the spectrum off."""
KNOWN = 0.1
"""Share of the spectrum that is known without the whole matrix: Lanczos quadrature puts the rest too high. At
half of the spectrum of a 1088 x 1088 Jacobian it was e^4 off, at a tenth e^0.2."""
IMAGES = 2
DENSE = 4096
"""Rows up to which the whole Jacobian is made."""
PLAIN = "plain"

_POINTS = 41  # of a spectrum; all of SHARES fall on one


EDITS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    # The spectral method gives the same tokens as an SVD, in a fraction of the time.
    "trained with SVD graying, eps 0.7": {"edits": ["gray_tokens eps=0.7"]},
    "trained with DCT graying, eps 0.7": {"edits": ["gray_tokens method=dct eps=0.7"]},
}


def variants(scale: Scale, data: str) -> list[Variant]:
    """At the small scale 16 tokens: few enough for the whole Jacobian of ViT-Tiny, 3072 x 3072."""
    is_small = scale == "small" and data_name(data) != "digits"
    size = {"image_size": 32, "patch_size": 8} if is_small else {}
    return [Variant(label, measured_vit(scale, data, **size | edit)) for label, edit in EDITS.items()]


def spectra_of_run(folder: Path) -> list[dict[str, Any]]:
    """The first block's attention without its skip, at the tokens of each image; one row a spectrum."""
    run = open_run(folder, IMAGES)
    return list(_measured(run, run.moment("last")))


def _measured(run: TrainedRun, moment: Moment) -> Iterator[dict[str, Any]]:
    model = run.model(moment)
    graying = next((call for call in run.recipe.edits if call["edit"] == "gray_tokens"), None)
    options: dict[str, Any] = {"density": True, "dense_limit": DENSE}
    for number in range(len(run.images)):
        image, row = run.images[number : number + 1], partial(_row, moment, image=number)
        as_it_is = spectrum_of(model, image, **options)
        if graying is not None:
            yield row(as_it_is, method=graying["method"], eps=graying["eps"])
            continue
        for method in METHODS:
            for where in PLACES:
                sweep = graying_sweep(model, image, EPS[1:], gray_method=method, where=where, **options)
                # With eps 1 nothing is grayed, by whichever method, wherever.
                for eps, found in {EPS[0]: as_it_is, **sweep}.items():
                    yield row(found, method=method, eps=eps, where=where)


def _row(
    moment: Moment,
    found: JacobianSpectrum,
    *,
    image: int,
    method: str,
    eps: float | None,
    where: str = "as trained",
) -> dict[str, Any]:
    top, bottom, kappa = found.records()
    relative = found.relative(_POINTS).tolist()
    is_exact = found.method == "dense"
    known = relative if is_exact else relative[: round(KNOWN * (len(relative) - 1)) + 1]
    return {
        "measure": MEASURE,
        **moment_row(moment),
        "method": method,
        "eps": eps,
        "where": where,
        "image": image,
        "block": found.block,
        "position": kappa.position,
        "size": found.size,
        "sigma_max": top.value,
        "sigma_max_status": top.status,
        "sigma_min": bottom.value,
        "sigma_min_status": bottom.status,
        "estimator": kappa.estimator,
        "dtype": kappa.dtype,
        "points": len(relative),
        "relative": [float(f"{value:.4g}") for value in known],
    }


def claims(records: Records) -> list[Claim]:
    return [
        _flatter(records, data, method, where)
        for data in records.datasets
        for where in PLACES
        for method in METHODS
    ]


def report(records: Records) -> Report:
    return Report(
        tables={"table": [row for data in records.datasets for row in _table(records, data)]},
        claims=claims(records),
        draw=partial(_draw, records),
        notes=(
            "A pre-norm branch has singular values of zero, two a token: LayerNorm forgets the mean and the "
            "length of a token. So shares of the spectrum are compared, not its kappa.",
            f"Of Jacobians with more than {DENSE} rows only the upper {KNOWN:.0%} is known.",
        ),
    )


def _table(records: Records, data: str) -> Iterator[dict[str, Any]]:
    for label in records.labels:
        for (method, where, eps), of_seed in _grouped(records, label, data).items():
            rows = [row for own in of_seed.values() for row in own]
            line: dict[str, Any] = {"data": data, "variant": label, "grayed": where}
            line |= {"method": method, "eps": eps, "seeds": len(of_seed), "spectra": len(rows)}
            line["sigma_max"] = _digits(statistics.fmean(row["sigma_max"] for row in rows))
            for share in SHARES:
                found = compare.spread(_log_at(own, share) for own in of_seed.values())
                line[f"ln relative at {share:.0%}"] = _round(found.mean if found else None)
                if share in (KNOWN, 0.5):
                    line[f"deviation at {share:.0%}"] = _round(found.deviation if found else None)
            yield line


def _flatter(records: Records, data: str, method: str, where: str) -> Claim:
    groups = _grouped(records, PLAIN, data)
    flattest, plain = (groups.get((method, where, eps), {}) for eps in (EPS[-1], EPS[0]))
    share = 0.5 if _is_known([*flattest.values(), *plain.values()], 0.5) else KNOWN
    sides = [
        {seed: value for seed, rows in side.items() if (value := _log_at(rows, share)) is not None}
        for side in (flattest, plain)
    ]
    grayed = "the block's input" if where == "blocks" else "the embedding"
    name = f"a lower eps flattens the Jacobian's spectrum: {method.upper()} graying of {grayed}"
    contrast = f"eps {EPS[-1]:g} - eps 1, {data}, ln of the value at {share:.0%} over the largest"
    return Claim(name, contrast, "higher", compare.difference(*sides))


Group = tuple[str, str, float]


def _grouped(records: Records, label: str, data: str) -> dict[Group, dict[int, list[Mapping[str, Any]]]]:
    """The rows of a label by method, place and eps, and by seed within."""
    groups: dict[Group, dict[int, list[Mapping[str, Any]]]] = {}
    for run in records.of(label, data):
        for row in run.measured:
            if row.get("measure") == MEASURE:
                key = (row["method"], row["where"], row["eps"])
                groups.setdefault(key, {}).setdefault(run.seed, []).append(row)
    return groups


def _log_at(rows: Sequence[Mapping[str, Any]], share: float) -> float | None:
    """Mean logarithm of the value, over the largest, that this share of the spectrum is above.

    None where it is not known of all.
    """
    if not _is_known([rows], share):
        return None
    picked = [row["relative"][round(share * (row["points"] - 1))] for row in rows]
    return statistics.fmean(math.log(max(value, 1e-12)) for value in picked)


def _is_known(groups: Iterable[Sequence[Mapping[str, Any]]], share: float) -> bool:
    every = [row for rows in groups for row in rows]
    return bool(every) and all(round(share * (row["points"] - 1)) < len(row["relative"]) for row in every)


def _draw(records: Records, path: Path) -> None:
    """A row a data set: a plot a method, and one of the models that were trained with graying."""
    canvas = Canvas(len(METHODS) + 1, max(1, len(records.datasets)))
    plots = iter(canvas.plots)
    for data in records.datasets:
        groups = _grouped(records, PLAIN, data)
        for method in METHODS:
            plot = next(plots)
            for color, eps in enumerate(EPS):
                for where, style in zip(PLACES, ("solid", "dotted"), strict=True):
                    # The legend names the solid ones; with eps 1 both are the same.
                    label = f"eps {eps:g}" if style == "solid" else f"_{where}, eps {eps:g}"
                    _curve(plot, groups.get((method, where, eps), {}), label, f"C{color}", style)
            title = f"{data}, grayed after training by {method.upper()}:\nblock's input, dotted: embedding"
            plot.set_title(title, fontsize=9)
        _draw_trained(next(plots), records, data)
    for plot in canvas.plots:
        plot.set(xlabel="share of the singular values", ylabel="singular value / largest")
        plot.set(yscale="log", ylim=(1e-8, 2.0), xlim=(0, 1))
    canvas.save(path)


def _draw_trained(plot: Any, records: Records, data: str) -> None:
    for color, label in enumerate(records.labels):
        for (_, where, eps), of_seed in _grouped(records, label, data).items():
            if where == "as trained" or (label == PLAIN and (where, eps) == ("blocks", 1.0)):
                _curve(plot, of_seed, label, f"C{color}")
    plot.set_title(f"{data}, trained with graying:\n{PLACES['embedding']}", fontsize=9)


def _curve(
    plot: Any,
    of_seed: Mapping[int, Sequence[Mapping[str, Any]]],
    label: str,
    color: str,
    style: str = "solid",
) -> None:
    """The geometric mean over images and seeds."""
    spectra = [row["relative"] for rows in of_seed.values() for row in rows]
    if not spectra or any(line.get_label() == label for line in plot.get_lines()):
        return
    length = min(map(len, spectra))
    logs = [[math.log(max(values[i], 1e-12)) for values in spectra] for i in range(length)]
    points = min(row["points"] for rows in of_seed.values() for row in rows)
    shares = [i / (points - 1) for i in range(length)]
    means = [math.exp(statistics.fmean(each)) for each in logs]
    plot.plot(shares, means, label=label, color=color, linestyle=style)


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


STUDY = Study(
    title="spectrum of one attention block's Jacobian under graying",
    paper="ASA supplement C, Fig. 7 and 8",
    claim="A lower eps flattens the spectrum of the attention's Jacobian, with SVD and with DCT graying.",
    variants=variants,
    report=report,
    after=spectra_of_run,
    on_cpu=True,
    decides="Several seeds a set: `python -m studies jacobian-spectrum --data cifar10:DIR --seeds 0-7`.",
)
