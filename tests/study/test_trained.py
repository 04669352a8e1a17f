"""What is read off the runs of each study of trained grids."""

import pytest

import study_runner
from short_runs import run as train_run
from wellposed.study import catalogue
from wellposed.study.trained.after import conditioning_and_density
from wellposed.study.trained.skip_depth import DEPTHS

TABLES = {
    "convmixer": {"table", "grid"},
    "eps-sweep": {"table", "grid", "progress"},
    "models": {"table", "grid", "gains"},
    "mae": {"table", "grid", "pretraining"},
    "context-broadcasting": {"table", "grid", "entropy"},
    "cb-position": {"table", "grid"},
    "both": {"table", "grid", "additions"},
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_and_a_figure(name: str, tmp_path) -> None:
    study = catalogue.get(name)
    outcome, text = study_runner.run(study, tmp_path, seeds=[0, 1], draw=True)
    report = outcome.report
    assert report is not None
    assert report.tables.keys() == TABLES[name]
    assert all(report.tables.values())
    assert (outcome.folder / "figure.png").exists()
    assert report.verdict != "incomplete"
    assert study.claim in text


def of(table, variant: str):
    return next(row for row in table if row["variant"] == variant)


def test_eps_sweep_reads_kappa_in_and_out(tmp_path) -> None:
    outcome, _ = study_runner.run(catalogue.get("eps-sweep"), tmp_path)
    assert outcome.report is not None
    table = outcome.report.tables["table"]
    plain, grayed = of(table, "no graying"), of(table, "spectral 0.7, pixels")
    assert plain["ln_kappa_in"] == pytest.approx(3.912)
    assert plain["ln_kappa_out"] == pytest.approx(3.689)
    assert grayed["ln_kappa_in"] == pytest.approx(3.219)
    assert (grayed["difference"], grayed["is_difference"]) == (1.0, True)
    assert outcome.report.verdict == "reproduced"


def test_eps_sweep_tells_the_gain_at_every_test(tmp_path) -> None:
    outcome, _ = study_runner.run(catalogue.get("eps-sweep"), tmp_path, seeds=[0, 1])
    assert outcome.report is not None
    rows = outcome.report.tables["progress"]
    assert [row["epoch"] for row in rows if row["variant"] == "dct 0.8, pixels"] == [1, 2]
    assert {(row["gain"], row["deviation"], row["n"]) for row in rows} == {(1.0, 0.0, 2)}
    assert "no graying" not in {row["variant"] for row in rows}


def test_models_tell_the_gains_of_each_set_and_of_all_together(tmp_path) -> None:
    outcome, _ = study_runner.run(
        catalogue.get("models"), tmp_path, seeds=[0, 1], data=["digits", "cifar10:DIR"]
    )
    assert outcome.report is not None
    rows = outcome.report.tables["gains"]
    of_swin = {
        row["data"]: (row["gain"], row["deviation"], row["n"]) for row in rows if "Swin" in row["model"]
    }
    assert of_swin == {"digits": (1.0, 0.0, 2), "cifar10": (1.0, 0.0, 2), "all sets": (1.0, 0.0, 4)}


@pytest.mark.parametrize("scale", ["small", "paper"])
def test_a_uniform_head_stands_beside_the_positions(scale: str, tmp_path) -> None:
    outcome, _ = study_runner.run(catalogue.get("cb-position"), tmp_path, seeds=[0, 1], scale=scale)
    assert outcome.report is not None
    row = of(outcome.report.tables["table"], "uniform head")
    assert (row["difference"], row["is_difference"]) == (0.5, True)
    assert "uniform head" not in outcome.report.reason
    assert "uniform head" in " ".join(outcome.report.notes)


def test_both_tells_whether_the_gains_add(tmp_path) -> None:
    outcome, _ = study_runner.run(catalogue.get("both"), tmp_path)
    assert outcome.report is not None
    first, _ = outcome.report.tables["additions"]
    assert (first["gain"], first["gain_cb"], first["gain_both"], first["beyond_sum"]) == (1.0, 2.0, 3.0, 0.0)
    assert outcome.report.verdict == "reproduced"


def test_skip_depth_has_a_row_a_depth(tmp_path) -> None:
    outcome, _ = study_runner.run(catalogue.get("skip-depth"), tmp_path, seeds=[0], draw=True)
    assert outcome.report is not None
    table = outcome.report.tables["table"]
    # Two variants, two initialisations, four depths, and at depth 12 two more.
    assert len(table) == 2 * 2 * (len(DEPTHS) + 2)
    row = next(row for row in table if (row["variant"], row["blocks_without"]) == ("no attention skip", 24))
    assert row["difference"] == -20.0
    assert (outcome.folder / "figure.png").exists()


def test_what_is_measured_on_a_run(tmp_path) -> None:
    train_run(tmp_path / "run", graying="dct", remove_skips="ffn")
    rows = conditioning_and_density(tmp_path / "run", tmp_path)
    kappas = {(row["block"], row["position"]) for row in rows if row["measure"] == "kappa"}
    assert {(0, "input"), (1, "attention.branch"), (1, "ffn.sum")} <= kappas
    heads = {(row["block"], row.get("head")) for row in rows if row["measure"] == "entropy"}
    assert heads == {(block, head) for block in (0, 1) for head in (None, 0, 1)}
