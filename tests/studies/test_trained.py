"""What is read off the runs of each study of trained variants."""

import pytest

import study_runner
from short_runs import run as train_run
from studies.measures import conditioning_and_density
from studies.skip_depth.study import DEPTHS
from studies.study import get
from study_material import claim_of

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
    done = study_runner.run(get(name), tmp_path, draw=True)
    assert done.report.tables.keys() == TABLES[name]
    assert all(done.report.tables.values())
    assert (done.folder / "figure.png").exists()
    assert all(claim.estimate is not None for claim in done.claims)


def of(table, variant: str):
    return next(row for row in table if row["variant"] == variant)


def test_eps_sweep_reads_kappa_in_and_out(tmp_path) -> None:
    done = study_runner.run(get("eps-sweep"), tmp_path)
    table = done.report.tables["table"]
    plain, grayed = of(table, "no graying"), of(table, "spectral 0.7, pixels")
    assert plain["ln_kappa_in"] == pytest.approx(3.912)
    assert plain["ln_kappa_out"] == pytest.approx(3.689)
    assert grayed["ln_kappa_in"] == pytest.approx(3.219)
    assert (grayed["difference"], grayed["pairs"]) == (1.0, 2)
    kappa = claim_of(done.report, "graying the pixels lowers the kappa of what enters")
    assert kappa.estimate is not None
    assert kappa.estimate.mean == pytest.approx(-0.693, abs=1e-3)


def test_eps_sweep_has_the_gain_at_every_test(tmp_path) -> None:
    rows = study_runner.run(get("eps-sweep"), tmp_path).report.tables["progress"]
    assert [row["epoch"] for row in rows if row["variant"] == "dct 0.8, pixels"] == [1, 2]
    assert {(row["difference"], row["pairs"]) for row in rows} == {(1.0, 2)}
    assert "no graying" not in {row["variant"] for row in rows}


def test_models_have_the_gains_of_each_set_and_of_all_together(tmp_path) -> None:
    rows = study_runner.run(get("models"), tmp_path, data=["digits", "cifar10:DIR"]).report.tables["gains"]
    of_swin = {row["data"]: (row["difference"], row["pairs"]) for row in rows if "Swin" in row["model"]}
    assert of_swin == {"digits": (1.0, 2), "cifar10": (1.0, 2), "all sets": (1.0, 4)}


@pytest.mark.parametrize("scale", ["small", "paper"])
def test_a_uniform_head_is_compared_with_the_positions(scale: str, tmp_path) -> None:
    done = study_runner.run(get("cb-position"), tmp_path, scale=scale)
    row = of(done.report.tables["table"], "uniform head")
    assert (row["difference"], row["pairs"]) == (0.5, 2)
    assert not any("uniform head" in claim.contrast for claim in done.claims)
    assert "uniform head" in " ".join(done.report.notes)


def test_both_shows_whether_the_gains_add(tmp_path) -> None:
    done = study_runner.run(get("both"), tmp_path)
    first, _ = done.report.tables["additions"]
    assert (first["gain"], first["gain_cb"], first["gain_both"], first["beyond_sum"]) == (1.0, 2.0, 3.0, 0.0)
    gains = [claim.estimate.mean for claim in done.claims if claim.estimate is not None]
    assert gains == pytest.approx([2.0, 1.0] * 2)


def test_skip_depth_has_a_row_a_depth(tmp_path) -> None:
    done = study_runner.run(get("skip-depth"), tmp_path, seeds=[0], draw=True)
    table = done.report.tables["table"]
    # Two variants, two initialisations, four depths, and at depth 12 two more.
    assert len(table) == 2 * 2 * (len(DEPTHS) + 2)
    row = next(row for row in table if (row["variant"], row["blocks_without"]) == ("no attention skip", 24))
    assert row["difference"] == -20.0
    assert (done.folder / "figure.png").exists()


def test_what_is_measured_on_a_run(tmp_path) -> None:
    train_run(tmp_path / "run", graying="dct", remove_skips="ffn")
    rows = conditioning_and_density(tmp_path / "run")
    kappas = {(row["block"], row["position"]) for row in rows if row["measure"] == "kappa"}
    assert {(0, "input"), (1, "attention.branch"), (1, "ffn.sum")} <= kappas
    heads = {(row["block"], row.get("head")) for row in rows if row["measure"] == "entropy"}
    assert heads == {(block, head) for block in (0, 1) for head in (None, 0, 1)}
