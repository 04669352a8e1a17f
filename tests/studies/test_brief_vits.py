"""Studies of small ViTs with a class token: what each calls supported, contradicted or undecided."""

import math

import pytest

import study_runner
from studies import compare, figures
from studies.graying_controls import study as controls
from studies.mean_and_difference import study as factors
from studies.one_recipe import study as one_recipe
from studies.persistence import study as persistence
from studies.remedies import study as remedies
from studies.study import Records, get
from study_material import claim_of, record
from wellposed.stats import Verdict

SEEDS = range(8)
WIGGLE = (0.0, 0.2, -0.1, 0.1, -0.2, 0.05, -0.05, 0.15)
"""What seeds differ by, in points."""


def measured(kappa: float = 50.0, validation: float = 0.5, rank: float = 9.0) -> list[dict]:
    where = {"block": 0, "position": "input"}
    out = {"block": 5, "position": "ffn.sum"}
    return [
        {"measure": "kappa", **where, "value": kappa},
        {"measure": "kappa", **out, "value": 2 * kappa},
        {"measure": "effective rank", **out, "value": rank},
        {"measure": "entropy", "block": 0, "value": 0.9},
        {"measure": "validation accuracy", "value": validation},
    ]


def runs(points: dict[str, float], seeds=SEEDS, **fields) -> list:
    """Runs of each variant: its accuracy, the same wiggle of a seed in all, a smaller one in each."""
    made = []
    for number, (label, accuracy) in enumerate(points.items()):
        for seed in seeds:
            value = accuracy + WIGGLE[seed] + 0.3 * WIGGLE[(3 * seed + number) % 8]
            rows = fields.get("rows", {}).get(label, measured())
            lr = fields.get("lr", {}).get(label, 2e-3)
            made.append(record(label, seed, value, measured=rows, recipe={"lr": lr}))
    return made


def test_graying_is_held_against_its_controls(tmp_path) -> None:
    points = dict.fromkeys([*controls.EDITS, *controls.RATES, controls.ZCA], 40.0)
    points |= {controls.SPECTRAL: 42.0, controls.UNSCALED: 42.0, controls.DCT: 38.0}
    best, other = controls.RATES
    rows = {best: measured(validation=0.6), other: measured(validation=0.4)}
    rows[controls.SPECTRAL] = measured(kappa=20.0)
    report = controls.report(Records("small", runs(points, rows=rows)))
    said = {
        "spectral 0.7 raises accuracy": Verdict.SUPPORTED,
        "DCT 0.95 raises accuracy": Verdict.CONTRADICTED,
        "condition raises accuracy": Verdict.UNDECIDED,
        f"beats none at its best learning rate ({best})": Verdict.SUPPORTED,
        "not of the norms": Verdict.SUPPORTED,
        "beats whitening pixels": Verdict.SUPPORTED,
        "rescaling makes no difference": Verdict.SUPPORTED,
    }
    assert {words: claim_of(report, words).verdict for words in said} == said
    kappa = claim_of(report, "spectral 0.7 lowers kappa of what enters").estimate
    assert kappa is not None
    assert kappa.mean == pytest.approx(math.log(20 / 50))
    report.draw(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000


def test_without_validation_images_no_learning_rate_is_chosen() -> None:
    rows = {label: measured()[:-1] for label in [*controls.EDITS, *controls.RATES]}
    points = dict.fromkeys(rows, 40.0)
    report = controls.report(Records("small", runs(points, rows=rows)))
    assert not any("best learning rate" in claim.name for claim in report.claims)


@pytest.mark.parametrize(
    ("halved", "verdict"), [(2.0, "supported"), (-2.0, "contradicted"), (0.0, "undecided")]
)
def test_the_factors_of_broadcasting_are_told_apart(halved: float, verdict: str) -> None:
    points = {
        factors.label(head, mean, difference): 40.0 + halved * (difference == 0.5)
        for head in factors.HEADS
        for mean in factors.MEANS
        for difference in factors.DIFFERENCES
    }
    report = factors.report(Records("small", runs(points)))
    claim = claim_of(report, "b = 1/2 against 1, mean over a, class token")
    assert claim.verdict.value == verdict
    same = claim_of(
        report, f"{factors.label('class token', 0.5, 0.5)} - {factors.label('class token', 1, 0.5)}"
    )
    assert same.verdict is Verdict.SUPPORTED, "equal within the margin"


def test_a_gain_that_goes_away_is_called_so() -> None:
    points = {
        persistence.label(name, times): 40.0 for name in persistence.LABELS for times in persistence.TIMES
    }
    points[persistence.label(controls.SPECTRAL, 1)] = 43.0
    points |= {persistence.label(controls.CONDITION, times): 43.0 for times in persistence.TIMES}
    report = persistence.report(Records("small", runs(points)))
    assert claim_of(report, "gain of spectral 0.7 shrinks").verdict is Verdict.SUPPORTED
    assert claim_of(report, "spectral 0.7 still raises").verdict is Verdict.UNDECIDED
    assert claim_of(report, "gain of condition shrinks").verdict is Verdict.UNDECIDED
    assert claim_of(report, "condition still raises").verdict is Verdict.SUPPORTED


def test_skips_at_one_recipe_are_judged_for_each_initialisation_and_depth() -> None:
    lost = {"all skips": 0.0, "no FFN skip": 2.0, "no attention skip": 20.0}
    points = {
        one_recipe.label(init, depth, row): 60.0
        - (lost[row] if init == "timm" else 5.0 * (row != "all skips"))
        for init in one_recipe.INITIALISATIONS
        for depth in one_recipe.DEPTHS
        for row in one_recipe.ROWS
    }
    report = one_recipe.report(Records("small", runs(points)))
    first = claim_of(report, "attention's skip is worth more than the FFN's: timm, 6 blocks")
    assert first.verdict is Verdict.SUPPORTED
    assert claim_of(report, "is worth more than the FFN's: torch, 6 blocks").verdict is Verdict.UNDECIDED
    row = next(row for row in report.tables["rows"] if (row["initialisation"], row["blocks"]) == ("timm", 3))
    assert row["all skips"] - row["no attention skip"] == pytest.approx(20.0, abs=0.1)


def test_remedies_are_compared_at_the_learning_rates_that_validation_chooses(tmp_path) -> None:
    """The highest test accuracy of a remedy counts only if the validation images choose its learning rate."""
    points, rows, rates = {}, {}, {}
    for name in remedies.REMEDIES:
        for rate in remedies.rates(name):
            label = remedies.label(name, rate)
            is_first = rate == remedies.rates(name)[0]
            points[label] = 40.0 if is_first else 45.0
            rows[label] = measured(validation=0.6 if is_first else 0.5, rank=7.0 if is_first else 3.0)
            rates[label] = rate
    points[remedies.label("CB", remedies.RATES[0])] = 42.0
    steps = [{"measure": "training step", "remedy": name, "ratio": 1.25} for name in remedies.REMEDIES]
    found = Records("small", runs(points, seeds=range(5), rows=rows, lr=rates), steps)
    report = remedies.report(found)
    assert claim_of(report, "CB raises accuracy").verdict is Verdict.SUPPORTED
    assert claim_of(report, "Muon raises accuracy").verdict is Verdict.UNDECIDED
    table = {row["remedy"]: row for row in report.tables["remedies"]}
    assert table["CB"]["learning rate"] == remedies.RATES[0]
    assert (table["CB"]["rank_out"], table["CB"]["step"]) == (7.0, 1.25)
    assert table["none"]["difference"] is None
    report.draw(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000


def test_a_step_of_each_remedy_is_timed_against_a_plain_one(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(remedies, "ROUNDS", 2)
    chosen = {name: remedies.REMEDIES[name] for name in ("none", "CB", "Muon", "mimetic initialisation")}
    monkeypatch.setattr(remedies, "REMEDIES", chosen)
    rows = remedies.steps_once("small", tmp_path, ["cifar10:DIR"], {})
    assert [row["remedy"] for row in rows] == list(chosen)
    assert rows[0]["ratio"] == 1.0
    assert all(0.1 < row["quartile_1"] <= row["ratio"] <= row["quartile_3"] < 10 for row in rows)


@pytest.mark.parametrize("name", ["graying-controls", "mean-and-difference", "persistence", "one-recipe"])
def test_they_run_from_recipes_to_verdicts(name: str, tmp_path) -> None:
    done = study_runner.run(get(name), tmp_path, data=["cifar10:DIR"], draw=True)
    assert done.claims
    assert (done.folder / "figure.png").exists()


def test_rank_is_that_of_the_last_block() -> None:
    early = {"measure": "effective rank", "block": 2, "position": "ffn.sum", "value": 4.0}
    assert compare.rank_out([record("none", 3, 40.0, measured=[early, *measured(rank=6.0)])]) == {3: 6.0}


def test_differences_without_an_interval_are_drawn_too(tmp_path) -> None:
    rows = [
        {"data": "digits", "variant": "none", "difference": None, "low": None, "high": None},
        {"data": "digits", "variant": "CB", "difference": 1.0, "low": None, "high": None},
    ]
    figures.draw_differences(rows, "variant", tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000
