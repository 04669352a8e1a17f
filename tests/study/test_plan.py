"""What studies are made of, and how two numbers are compared."""

import dataclasses
import math

import pytest

from wellposed.study import catalogue
from wellposed.study.choosing import best_of, broken_runs, score
from wellposed.study.compare import (
    Claim,
    accuracy_claim,
    accuracy_table,
    difference,
    log_kappas,
    spread,
    verdict,
)
from wellposed.study.plan import Cell, RunRecord, StudyRecords, data_name, grid
from wellposed.train.recipe import Recipe, combine


def record(label: str, seed: int, accuracy: float, **fields) -> RunRecord:
    result = {"test": {"accuracy": accuracy / 100}}
    usual = {"data": "digits", "fields": {}, "chosen": {}, "recipe": {}, "state": "finished"}
    return RunRecord(label=label, seed=seed, result=result, **usual | fields)


def test_a_grid_keeps_the_label_and_names_the_files() -> None:
    made = grid([Cell("A b", {"eps": 0.5}), Cell("C")], init=("timm", "xavier"), lr=(0.1,))
    assert [cell.label for cell in made] == ["A b", "A b", "C", "C"]
    assert [cell.name for cell in made][:2] == ["a-b-inittimm-lr0.1", "a-b-initxavier-lr0.1"]
    assert made[1].fields == {"eps": 0.5, "init": "xavier", "lr": 0.1}
    assert made[1].chosen == {"init": "xavier", "lr": 0.1}


def test_a_run_that_ends_below_its_own_trial_is_told() -> None:
    def runs(last: float, **fields) -> StudyRecords:
        chosen = {"init": "xavier", "lr": 3e-4}
        others = [record("no skip", 0, 60.0, trial=True, best=False), record("all", 0, 10.0, trial=True)]
        trial = record("no skip", 0, 49.2, trial=True, chosen=chosen)
        end = record("no skip", fields.pop("seed", 0), last, chosen=chosen, **fields)
        ends = [end, record("all", 0, 88.7)]
        return StudyRecords("x", "small", [*others, trial, *ends])

    (told,) = broken_runs(runs(19.3))
    assert told.startswith("no skip, digits, seed 0: broke with init=xavier, lr=0.0003, 19.3 in the end and")
    assert told.endswith("49.2 in its short trial; so did all others, and the best trial's stands.")
    (told,) = broken_runs(runs(19.3, best=False))
    assert told.endswith("another setting stands for it.")
    (told,) = broken_runs(runs(19.3, seed=1))
    assert told.endswith("the seed that chooses did not.")
    ended = runs(19.3)
    ended.runs[-2].result.update(collapsed=True, test={"accuracy": 0.193, "epoch": 55})
    (told,) = broken_runs(ended)
    assert "19.3 when it was ended after epoch 55 and 49.2 in its short trial" in told
    # Less than what one seed can tell is no break.
    assert not broken_runs(runs(48.0))


def test_the_name_of_a_set_has_no_folder() -> None:
    specs = (
        "digits",
        "cifar100:/a/b",
        "packed:/a/Tiny Set.npz",
        "/a/ImageNet",
        "hf:user/birds",
        "wds:/a/x.tar",
    )
    names = [data_name(spec) for spec in specs]
    assert names == ["digits", "cifar100", "tiny-set", "imagenet", "birds", "x"]


def test_a_difference_smaller_than_its_deviation_is_none() -> None:
    by_seed = {0: 90.0, 1: 80.0, 2: 70.0}
    # What the seeds share does not count: each pair differs by 1.
    paired = difference(by_seed, {seed: value - 1 for seed, value in by_seed.items()})
    assert paired is not None
    assert (paired.mean, paired.deviation, paired.n) == (1.0, 0.0, 3)
    assert paired.is_one
    noisy = difference({0: 1.0, 1: 0.0}, {0: 0.0, 1: 0.5})
    assert noisy is not None
    assert not noisy.is_one
    # Other seeds: both deviations.
    apart = difference({0: 1.0, 1: 3.0}, {2: 1.0, 3: 1.0})
    assert apart is not None
    assert (apart.mean, apart.deviation) == (1.0, pytest.approx(2**0.5))
    assert difference({}, {0: 1.0}) is None


@pytest.mark.parametrize(("points", "is_one"), [(1.9, False), (2.1, True), (-2.1, True)])
def test_one_seed_needs_two_points(points: float, is_one: bool) -> None:
    found = difference({0: 90.0 + points}, {0: 90.0})
    assert found is not None
    assert found.is_one is is_one


def test_spread_leaves_out_what_is_missing() -> None:
    assert spread([None, float("nan")]) is None
    assert str(spread([1.0, 3.0, None])) == "2.00 ± 1.41"
    assert str(spread([1.0])) == "1.00"


def claim(says, points: float | None, within: float = 0.0, paper: float | None = None) -> Claim:
    found = None if points is None else difference({0: points, 1: points + 0.1}, {0: 0.0, 1: 0.0})
    return Claim("a minus b", says, found, within, paper)


@pytest.mark.parametrize(
    ("claims", "expected"),
    [
        ([claim("higher", 1.0), claim("lower", -1.0)], "reproduced"),
        ([claim("higher", 1.0), claim("higher", -1.0)], "partly"),
        ([claim("higher", 1.0), claim("higher", 0.01)], "partly"),
        ([claim("higher", -1.0)], "not"),
        ([claim("higher", -1.0), claim("higher", 0.01)], "not"),
        ([claim("higher", 0.01)], "no difference"),
        ([claim("lower", -2.0, paper=-3.0)], "reproduced"),
        ([claim("lower", -2.0, paper=-22.0)], "partly"),
        ([claim("same", 0.01), claim("same", 0.15, within=0.2)], "reproduced"),
        ([claim("same", 1.0, within=0.2)], "not"),
        ([claim("higher", 1.0), claim("higher", None)], "incomplete"),
        ([], "incomplete"),
    ],
)
def test_verdicts(claims, expected: str) -> None:
    got, reason = verdict(claims)
    assert got == expected
    assert all(one.what in reason for one in claims)


def test_tables_and_claims_take_the_best_cells_only() -> None:
    runs = [
        record("base", 0, 90.0),
        record("base", 1, 91.0),
        record("edit", 0, 10.0, best=False, chosen={"lr": 0.1}),
        record("edit", 0, 92.0, chosen={"lr": 0.2}),
        record("edit", 1, 93.0, chosen={"lr": 0.2}),
        record("edit", 2, 0.0, state="failed", chosen={"lr": 0.2}),
        record("before", 0, 50.0, reported=False),
    ]
    records = StudyRecords("x", "small", runs)
    base, edit = accuracy_table(records, "base", {"edit": 95.0})
    assert (base["accuracy"], base["n"], base["difference"]) == (90.5, 2, None)
    assert (edit["accuracy"], edit["n"], edit["difference"], edit["is_difference"]) == (92.5, 2, 2.0, True)
    assert (edit["chosen"], edit["paper"]) == ("lr=0.2", 95.0)
    assert accuracy_claim(records, "digits", "edit", "base", "higher").outcome == "holds"
    assert accuracy_claim(records, "digits", "nothing", "base", "higher").outcome == "missing"


def test_a_run_that_broke_has_the_accuracy_of_its_last_test() -> None:
    assert record("a", 0, 40.0, state="nonfinite").accuracy == pytest.approx(40.0)
    assert record("a", 0, 40.0, state="failed").accuracy is None


@pytest.mark.parametrize("test", [{"loss": "nan"}, {"loss": 1.5, "nonfinite": 3}])
def test_a_test_that_missed_images_has_no_accuracy(test) -> None:
    whole = record("a", 0, 40.0)
    part = dataclasses.replace(whole, result={"test": {"accuracy": 0.4, **test}})
    assert part.accuracy is None
    assert score(part) < score(whole)


@pytest.mark.parametrize("scale", ["small", "paper"])
@pytest.mark.parametrize("name", catalogue.MODULES)
def test_every_cell_is_a_recipe(name: str, scale) -> None:
    study = catalogue.get(name)
    assert study.name == name
    cells = study.cells(scale)
    labels = {cell.label for cell in cells}
    assert len({cell.name for cell in cells}) == len(cells)
    for data in ("digits", "cifar10:DIR", "DIR"):
        base = study.base(scale, data)
        for cell in cells:
            made = combine(base.to_mapping(), cell.fields)
            assert isinstance(made, Recipe)
            assert cell.starts_from is None or cell.starts_from in labels


def test_the_list_has_every_study() -> None:
    listed = catalogue.listing()
    assert [name for name, _, _ in listed] == list(catalogue.MODULES)
    on_a_laptop = {name for name, title, _ in listed if "laptop" in title}
    assert {"skip-ablation", "jacobian-spectrum", "bounds", "density"} <= on_a_laptop
    with pytest.raises(ValueError, match="did you mean 'skip-depth'"):
        catalogue.get("skip-dept")


def test_kappa_is_of_the_last_weights() -> None:
    def row(value: float, **more) -> dict:
        return {"measure": "kappa", "block": 0, "position": "input", "value": value, **more}

    several = [row(2.0, weights="initial"), row(4.0, weights="last"), row(8.0, weights="best")]
    runs = [record("a", 0, 90.0, measured=several), record("a", 1, 90.0, measured=[row(16.0)])]
    assert log_kappas(runs, "input") == {0: {0: math.log(4.0)}, 1: {0: math.log(16.0)}}


def test_one_seed_does_not_show_that_two_are_the_same() -> None:
    for points, seeds, expected in (
        (0.1, 1, "incomplete"),
        (1.0, 1, "incomplete"),
        (3.0, 1, "not"),
        (0.1, 2, "reproduced"),
        (1.0, 2, "not"),
    ):
        found = difference({seed: 90.0 + points for seed in range(seeds)}, dict.fromkeys(range(seeds), 90.0))
        assert verdict([Claim("a minus b", "same", found, within=0.2)])[0] == expected


def test_the_reason_has_numbers() -> None:
    against = difference({0: 88.0, 1: 87.0, 2: 88.5}, {0: 90.0, 1: 90.0, 2: 90.0})
    got, reason = verdict([Claim("a minus b", "higher", against, paper=2.0)])
    assert (got, reason) == (
        "not",
        "a minus b: -2.17 ± 0.76 (n = 3), the paper +2: contrary, not higher",
    )
    one = Claim("a minus b", "higher", difference({0: 90.5}, {0: 90.0}))
    assert str(one) == "a minus b: +0.50 (n = 1): no difference, one seed tells none below 2"
    small = Claim("a minus b", "lower", difference({0: 80.0, 1: 80.2}, {0: 81.0, 1: 81.0}), paper=-20.0)
    assert str(small).endswith("the direction holds, but it is less than half of the paper's")


def test_one_run_a_side_with_other_seeds_has_no_deviation() -> None:
    found = difference({0: 90.0}, {1: 89.0, 2: 88.0})
    assert found is not None
    assert (found.deviation, found.n) == (None, 1)


def test_trials_closer_than_one_seed_can_tell_are_decided_by_the_order() -> None:
    cells = [Cell(name) for name in ("usual", "near", "best", "worse")]

    def best(*accuracies: float, trial: bool) -> str:
        runs = [
            record(cell.label, 0, accuracy, trial=trial)
            for cell, accuracy in zip(cells, accuracies, strict=True)
        ]
        return best_of(list(zip(cells, runs, strict=True))).label

    assert best(60, 60.5, 61.3, 50, trial=True) == "usual"
    assert best(58, 60.5, 61.3, 50, trial=True) == "near"
    # A run that is reported itself is not put behind a worse one.
    assert best(60, 60.5, 61.3, 50, trial=False) == "best"
