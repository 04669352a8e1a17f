"""The tables of docs/findings.md: each claim of the papers with its evidence, from the studies' summaries.

    python -m studies.findings

It writes the README of each study again, too, with those that were not run.

A line names a claim by its study and contrast, so that a table can say nothing that no record says.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from studies.report import read_summary, readme
from studies.study import ROOT, Scale, folder_of, get, names
from wellposed.files import write_text
from wellposed.stats import Claim
from wellposed.study_records import claim_from_dict

PAGE = ROOT.parent / "docs" / "findings.md"
END = "<!-- end of claims -->"
HEAD = ["| claim | measured on | n | difference [95%] | paper | verdict |", "| - | - | - | - | - | - |"]


@dataclass(frozen=True)
class Line:
    """A claim of a table.

    Args:
        says: the claim in words.
        study: that measured it.
        on: data set or model, in words.
        contrast: of the claim, as its study has it.
        name: of the claim, where several have that contrast.
        scale: of the study.
    """

    says: str
    study: str
    on: str
    contrast: str
    name: str = ""
    scale: Scale = "small"


def accuracy(says: str, study: str, first: str, second: str, **sets: str) -> list[Line]:
    """A line a data set, of the difference of two variants; ``sets`` are words by name."""
    return [
        Line(says, study, words, f"{first} - {second}, {name.replace('_', '-')}, points of accuracy")
        for name, words in sets.items()
    ]


TINY = {"tiny_imagenet_50": "Tiny-ImageNet-50"}
CIFAR = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}
DIGITS = {"digits": "digits"}
NEAREST = "ln bound - ln kappa where they are nearest, all skips"
MIDDLE = "ln of the value at 50% over the largest"
BRIEF = {"cifar10_20k": "CIFAR-10, 3 epochs"}

SKIPS = [
    *accuracy(
        "a ViT loses points without attention's skips",
        "skip-ablation",
        "no attention skip",
        "all skips",
        **DIGITS,
        cifar10="CIFAR-10",
    ),
    *accuracy(
        "it loses points without the FFN's",
        "skip-ablation",
        "no FFN skip",
        "all skips",
        **DIGITS,
        cifar10="CIFAR-10",
    ),
    *accuracy(
        "attention's skips are worth more",
        "skip-ablation",
        "no attention skip",
        "no FFN skip",
        **DIGITS,
        cifar10="CIFAR-10",
    ),
    *(
        Line(
            "attention's output has the higher ln kappa",
            "skip-ablation",
            words,
            f"attention - FFN without their skips, all skips, {name}, median ln kappa of the blocks",
        )
        for name, words in {**DIGITS, "cifar10": "CIFAR-10"}.items()
    ),
    Line(
        "so has that of trained ImageNet weights",
        "pretrained",
        "DeiT-Ti, 32 images",
        "attention.branch - ffn.branch, trained weights, ln kappa by image",
    ),
    Line(
        "Proposition 4.1 holds (linear attention)",
        "bounds",
        "four sets",
        NEAREST,
        "kappa is below its bound: Prop. 4.1, attention without skip, linear attention",
    ),
    Line(
        "Proposition 4.2 holds",
        "bounds",
        "four sets",
        NEAREST,
        "kappa is below its bound: Prop. 4.2, attention with skip, linear attention",
    ),
    Line(
        "the FFN's bound holds (linear)",
        "bounds",
        "four sets",
        NEAREST,
        "kappa is below its bound: FFN, without its activation",
    ),
    Line(
        "the skip lowers attention's ln kappa",
        "bounds",
        "four sets",
        "Prop. 4.2 - Prop. 4.1, linear attention, all skips, ln kappa after training",
    ),
    *accuracy(
        "a ConvMixer needs no skips (margin 0.2)",
        "convmixer",
        "without skips",
        "with skips",
        **DIGITS,
        **TINY,
        **CIFAR,
    ),
]
GRAYING = [
    *accuracy(
        "spectral graying of the embedding (0.7) helps",
        "eps-sweep",
        "spectral 0.7, embedding",
        "no graying",
        **DIGITS,
        **TINY,
        **CIFAR,
    ),
    *accuracy("of the pixels", "eps-sweep", "spectral 0.7, pixels", "no graying", **DIGITS, **TINY, **CIFAR),
    *accuracy("it helps with a class token", "graying-controls", "spectral 0.7", "none", **BRIEF),
    *accuracy("it beats equal norms", "graying-controls", "spectral 0.7", "energy of spectral 0.7", **BRIEF),
    *accuracy(
        "it beats the plain model at its best learning rate",
        "graying-controls",
        "spectral 0.7",
        "none, learning rate 1e-3",
        **BRIEF,
    ),
    *accuracy("it beats whitened pixels", "graying-controls", "spectral 0.7", "ZCA pixels", **BRIEF),
    *accuracy("conditioned tokens (kappa at most 2) help", "graying-controls", "condition", "none", **BRIEF),
    *accuracy(
        "DCT graying helps a masked autoencoder",
        "mae",
        "MAE + DCT, fine-tuned",
        "MAE, fine-tuned",
        **DIGITS,
        **TINY,
    ),
    Line(
        "SVD graying flattens the Jacobian of the block that reads it",
        "jacobian-spectrum",
        "digits",
        f"eps 0.5 - eps 1, digits, {MIDDLE}",
        "a lower eps flattens the Jacobian's spectrum: SVD graying of the block's input",
    ),
    Line(
        "so does DCT graying",
        "jacobian-spectrum",
        "digits",
        f"eps 0.5 - eps 1, digits, {MIDDLE}",
        "a lower eps flattens the Jacobian's spectrum: DCT graying of the block's input",
    ),
    Line(
        "a trained DeiT-Ti takes spectral 0.95 untrained (margin 1)",
        "pretrained",
        "1,000 images",
        "spectral 0.95, embedding - none, points of top-1 by image, without training",
    ),
    Line(
        "spectral 0.7 costs it accuracy",
        "pretrained",
        "1,000 images",
        "spectral 0.7, embedding - none, points of top-1 by image, without training",
    ),
    Line(
        "DCT graying costs at most 5% of a step",
        "training-time",
        "ViT-B, H200",
        "dct-embedding / plain - 1, time of a training step",
    ),
    Line(
        "SVD graying at least doubles it",
        "training-time",
        "ViT-B, H200",
        "svd-embedding / plain - 2, time of a training step",
    ),
]
BROADCASTING = [
    *accuracy(
        "CB helps a ViT with a class token",
        "cb-heads",
        "class token, CB",
        "class token, none",
        **BRIEF,
    ),
    *accuracy(
        "so does CB_S",
        "cb-heads",
        "class token, CB_S",
        "class token, none",
        **BRIEF,
    ),
    Line(
        "attention gets sparser (entropy over log n)",
        "cb-heads",
        "CIFAR-10, 3 epochs",
        "class token, CB - class token, none, cifar10-20k, entropy over log n",
    ),
    Line(
        "the model keeps more of its accuracy under corruptions",
        "cb-heads",
        "CIFAR-10, 3 epochs",
        "class token, CB - class token, none, cifar10-20k, accuracy corrupted less clean, points",
    ),
    Line(
        "CB gains more with a class token than with pooling",
        "cb-heads",
        "CIFAR-10, 3 epochs",
        "gain with class token - gain with mean pool, cifar10-20k, points of accuracy",
    ),
    Line(
        "halving what differs from the mean helps",
        "mean-and-difference",
        "CIFAR-10, 3 epochs",
        "b = 1/2 against 1, mean over a, class token, cifar10-20k, points of accuracy",
    ),
    *accuracy(
        "doubling the mean helps",
        "mean-and-difference",
        "class token, 2 m + 1 d",
        "class token, 1 m + 1 d",
        **BRIEF,
    ),
    *accuracy(
        "halving the whole output does as much as CB (margin 0.5)",
        "mean-and-difference",
        "class token, 0.5 m + 0.5 d",
        "class token, 1 m + 0.5 d",
        **BRIEF,
    ),
    *accuracy(
        "CB helps (pooled models: not as published)",
        "context-broadcasting",
        "CB",
        "none",
        **DIGITS,
        **TINY,
        **CIFAR,
    ),
    Line(
        "CB in all blocks costs a trained DeiT-Ti accuracy",
        "pretrained",
        "1,000 images",
        "CB, all blocks - none, points of top-1 by image, without training",
    ),
    Line(
        "trained attention is dense (entropy over log n, less 0.5)",
        "pretrained",
        "DeiT-Ti, 32 images",
        "entropy over log n - 0.5, by image",
    ),
    Line(
        "denser rows have a steeper softmax (nuclear norm)",
        "density",
        "digits",
        "rank correlation of entropy and norm, digits",
        "denser rows have a steeper softmax by the nuclear norm (trace)",
    ),
]
PLAIN = "none, learning rate 0.001"
REMEDIES = [
    *accuracy("Muon", "remedies", "Muon, learning rate 0.005", PLAIN, **BRIEF),
    *accuracy("spectral graying 0.7", "remedies", "spectral graying, learning rate 0.001", PLAIN, **BRIEF),
    *accuracy("DCT graying 0.95", "remedies", "DCT graying, learning rate 0.002", PLAIN, **BRIEF),
    *accuracy("CB", "remedies", "CB, learning rate 0.002", PLAIN, **BRIEF),
    *accuracy("normalised weights", "remedies", "normalise_spectrum, learning rate 0.001", PLAIN, **BRIEF),
    *accuracy(
        "mimetic initialisation", "remedies", "mimetic initialisation, learning rate 0.001", PLAIN, **BRIEF
    ),
    *accuracy(
        "skipless initialisation", "remedies", "skipless initialisation, learning rate 0.002", PLAIN, **BRIEF
    ),
    *accuracy("conditioned tokens", "remedies", "condition, learning rate 0.002", PLAIN, **BRIEF),
    *accuracy(
        "conditioned weights (10 I)", "remedies", "condition_weights, learning rate 0.004", PLAIN, **BRIEF
    ),
]
TABLES = {"skips": SKIPS, "graying": GRAYING, "broadcasting": BROADCASTING, "remedies": REMEDIES}


def claim_of(line: Line) -> Claim:
    """The claim that a line names."""
    folder = folder_of(line.study, line.scale)
    claims = [claim_from_dict(each) for each in read_summary(folder).get("claims", [])]
    found = [each for each in claims if each.contrast == line.contrast and line.name in ("", each.name)]
    if len(found) != 1:
        raise ValueError(
            f"expected one claim with the contrast {line.contrast!r} in {folder}, got {len(found)}; "
            "it has " + "; ".join(dict.fromkeys(each.contrast for each in claims))
        )
    return found[0]


def rows(lines: Sequence[Line]) -> list[str]:
    """A row a line; what is said of several sets is said once."""
    made = []
    before = ""
    for line in lines:
        claim, said = claim_of(line), line.study + line.says
        estimate = claim.estimate
        assert estimate is not None
        numbers = str(estimate).rsplit(", n = ")[0]
        paper = "" if claim.paper is None else f"{claim.paper:+g}"
        link = f"[{line.says}](../studies/{line.study.replace('-', '_')}/README.md)"
        cells = ["" if said == before else link, line.on, str(estimate.n), numbers, paper]
        made.append("| " + " | ".join([*cells, claim.verdict.value]) + " |")
        before = said
    return made


def with_tables(page: str) -> str:
    """The page with its tables made again, each between its marks."""
    for name, lines in TABLES.items():
        before, mark, rest = page.partition(f"<!-- claims: {name} -->\n")
        _, end, after = rest.partition(END)
        if not (mark and end):
            raise ValueError(f"expected the marks of the table {name!r} in {PAGE}, there are none.")
        page = before + mark + "\n".join([*HEAD, *rows(lines), ""]) + end + after
    return page


def pages() -> dict[Path, str]:
    """The README of each study."""
    folders = {name: ROOT / name.replace("-", "_") for name in names()}
    return {folder / "README.md": readme(name, get(name), folder) for name, folder in folders.items()}


def main(path: Path = PAGE) -> None:
    write_text(path, with_tables(path.read_text(encoding="utf-8")))
    for file, text in pages().items():
        write_text(file, text)


if __name__ == "__main__":
    main()
