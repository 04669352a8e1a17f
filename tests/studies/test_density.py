"""How dense trained attention is."""

import torch

from studies.density import study as density
from studies.density.softmax_rows import attention_rows, rank_correlation
from study_material import draws, kept, records
from wellposed.train.runs import open_run


def test_density_of_a_run(run, tmp_path):
    rows = kept(density.density_of_run(run))
    report = density.report(records({("plain", 0): rows, ("plain", 1): rows}))
    table = report.tables["table"]
    assert [row["block"] for row in table] == [0, 1]
    assert all(row["lowest head"] <= row["entropy"] <= row["highest head"] for row in table)
    assert any("mean over the heads" in claim.contrast for claim in report.claims)
    assert any("training takes the mean entropy" in note for note in report.notes)
    draws(report, tmp_path)


def test_rows_of_attention_are_those_of_the_model(run):
    trained = open_run(run, 3)
    model = trained.model(trained.moment("last"))
    rows = list(attention_rows(model, trained.images))
    tokens = 17
    for row in rows:
        if row["measure"] == "softmax rows":
            assert row["keys"] == tokens
            # The trace is 1 - |p|^2, and |p|^2 at least 1 / n; the Frobenius norm is at most the trace.
            assert all(0 <= trace <= 1 - 1 / tokens + 1e-4 for trace in row["trace"])
            assert all(f <= t + 1e-4 for f, t in zip(row["frobenius"], row["trace"], strict=True))
    counted = {row["rows"] for row in rows if row["measure"] == "softmax correlation"}
    assert counted == {3 * 2 * 2 * tokens}  # images, blocks, heads, queries


def test_rank_correlation_has_a_sign_and_none_without_variation():
    x = torch.arange(10.0)
    assert rank_correlation(x, -(x**3)) == -1
    assert rank_correlation(x, torch.ones(10)) is None
