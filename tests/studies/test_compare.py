"""How two numbers are compared, and what counts in a table."""

import math

import pytest

from studies.compare import accuracy_claim, accuracy_table, difference, log_kappa, spread
from studies.study import ROOT, Records, data_name, get, names
from study_material import record
from wellposed.stats import Verdict, judged


def test_the_name_of_a_set_has_no_folder() -> None:
    specs = (
        "digits",
        "cifar100:/a/b",
        "packed:/a/Tiny Set.npz",
        "/a/ImageNet",
        "hf:user/birds",
        "wds:/a/x.tar",
    )
    found = [data_name(spec) for spec in specs]
    assert found == ["digits", "cifar100", "tiny-set", "imagenet", "birds", "x"]


def test_differences_are_taken_seed_by_seed() -> None:
    by_seed = {0: 90.0, 1: 80.0, 2: 70.0}
    # What the seeds share does not count: the pairs differ by about 1.
    paired = difference(by_seed, {seed: value - 1 - 0.1 * (seed - 1) for seed, value in by_seed.items()})
    assert paired is not None
    assert (paired.mean, paired.n) == (pytest.approx(1.0), 3)
    assert paired.low > 0
    noisy = difference({0: 1.0, 1: 0.0}, {0: 0.0, 1: 0.5})
    assert noisy is not None
    assert noisy.covers(0.0)
    # Of other seeds there are no pairs, and so no difference.
    assert difference({0: 1.0, 1: 3.0}, {2: 1.0, 3: 1.0}) is None
    assert difference({}, {0: 1.0}) is None


@pytest.mark.parametrize("points", [1.9, 2.1, -2.1, 20.0])
def test_one_seed_has_no_interval(points: float) -> None:
    found = difference({0: 90.0 + points}, {0: 90.0})
    assert found is not None
    assert found.covers(0.0)
    assert found.p is None


def test_spread_skips_what_is_missing() -> None:
    assert spread([None, float("nan")]) is None
    assert str(spread([1.0, 3.0, None])) == "2.00 ± 1.41"
    assert str(spread([1.0])) == "1.00"


def test_tables_and_claims_take_results_only() -> None:
    runs = [
        record("base", 0, 90.0),
        record("base", 1, 91.0),
        record("edit", 0, 10.0, role="other setting", chosen={"lr": 0.1}),
        record("edit", 0, 92.0, chosen={"lr": 0.2}),
        record("edit", 0, 99.0, role="trial", chosen={"lr": 0.2}),
        record("edit", 1, 93.2, chosen={"lr": 0.2}),
        record("edit", 2, 0.0, state="failed", chosen={"lr": 0.2}),
        record("before", 0, 50.0, role="start"),
    ]
    records = Records("small", runs)
    base, edit = accuracy_table(records, "base", {"edit": 95.0})
    assert (base["accuracy"], base["n"], base["difference"]) == (90.5, 2, None)
    assert (edit["accuracy"], edit["n"], edit["difference"], edit["pairs"]) == (92.6, 2, 2.1, 2)
    assert (edit["chosen"], edit["paper"]) == ("lr=0.2", 95.0)
    holds = accuracy_claim(records, "digits", "it helps", "edit", "base", "higher")
    missing = accuracy_claim(records, "digits", "it helps", "nothing", "base", "higher")
    assert [claim.verdict for claim in judged([holds, missing])] == [Verdict.SUPPORTED, Verdict.UNDECIDED]
    assert missing.estimate is None
    # The seed that chose a setting by the accuracy is no evidence on the accuracy.
    one = accuracy_claim(records, "digits", "it helps", "edit", "base", "higher", without=[0])
    assert one.estimate is not None
    assert one.estimate.n == 1


def test_kappa_is_of_the_last_weights() -> None:
    def row(value: float, **more: object) -> dict[str, object]:
        return {"measure": "kappa", "block": 0, "position": "input", "value": value, **more}

    several = [row(2.0, weights="initial"), row(4.0, weights="last"), row(8.0, weights="best")]
    first, second = record("a", 0, 90.0, measured=several), record("a", 1, 90.0, measured=[row(16.0)])
    found = [log_kappa(run, "input", 0) for run in (first, second)]
    assert [each and each.value for each in found] == [math.log(4.0), math.log(16.0)]


def test_every_study_is_there() -> None:
    assert len(names()) == len(list(ROOT.glob("*/study.py"))) >= 19
    on_a_laptop = {name for name in names() if get(name).on_cpu}
    assert on_a_laptop == {"skip-ablation", "jacobian-spectrum", "bounds", "density"}
    with pytest.raises(ValueError, match="the studies are both, bounds"):
        get("skip-dept")
