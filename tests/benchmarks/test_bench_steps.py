"""Edits timed in a training step: order, ratios, failures, and what an interrupted run leaves."""

import contextlib
import functools
from dataclasses import replace

import pytest
import torch

from benchmarks import graying
from benchmarks import graying_steps as steps
from benchmarks.graying import read_steps, wide
from benchmarks.graying_steps import Timed, in_turn, measure_steps, step_rows
from wellposed.train.recipe import Recipe

CPU = torch.device("cpu")
RECIPE = Recipe(model="test_vit", image_size=32, batch_size=2, compile=False)


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """The edits whose steps were taken, in order, in place of real steps."""
    taken: list[str] = []

    def fake(recipe: Recipe, device, classes, channels):
        (name,) = [edit for edit, call in steps.EDITS.items() if [call] == list(recipe.edits)] or ["plain"]
        if name == "dct-pixels":
            raise RuntimeError("does not compile")
        return lambda updates: taken.extend([name] * updates)

    monkeypatch.setattr(steps, "bare_step", fake)
    return taken


def measured(edits: list[str], rounds: int = 2, updates: int = 2) -> list[dict[str, Timed]]:
    return list(measure_steps(RECIPE, edits, CPU, rounds=rounds, updates=updates, warm_up=1))


def test_steps_alternate(calls) -> None:
    measured(["cb", "cb_s"], rounds=3)
    names = ["plain", "cb", "cb_s"]
    assert calls[:3] == names  # warm-up
    expected = [name for index in range(3) for name in in_turn(names, index) for _ in range(1 + 2)]
    assert calls[3:] == expected
    assert [in_turn(names, index)[0] for index in range(3)] == ["plain", "cb_s", "plain"]


def test_an_edit_that_fails_leaves_the_others(calls) -> None:
    results = measured(["dct-pixels", "cb"])[-1]
    assert results["dct-pixels"].failure == "RuntimeError: does not compile"
    rows = {row.edit: row for row in step_rows(results)}
    assert rows["dct-pixels"].status == "failed"
    assert rows["cb"].rounds == 2


def test_ratios_are_taken_within_a_round() -> None:
    results = {
        "plain": Timed([1.0, 2.0, 4.0], peak_bytes=2**30),
        "cb": Timed([1.1, 2.4, 4.0], peak_bytes=3 * 2**29),
    }
    plain, row = step_rows(results, {"plain": 0.5, "cb": 0.01})
    assert (row.ratio, row.ratio_low, row.ratio_high) == pytest.approx((1.1, 1.0, 1.2))
    assert (row.milliseconds, row.low, row.high) == pytest.approx((2400, 1100, 4000))
    assert row.added == pytest.approx(100)
    assert row.peak_gib_over_plain == pytest.approx(0.5)
    assert (row.floor, row.added_floor) == pytest.approx((510, 10))
    assert (plain.ratio, plain.floor, plain.added) == (1.0, 500.0, None)
    assert row.each_round == "1100.000 2400.000 4000.000"


def test_an_interrupted_run_leaves_its_rounds(calls, monkeypatch, tmp_path) -> None:
    tell = graying._teller

    def interrupt(console):
        def say(text: str) -> None:
            if text.startswith("round 2"):
                raise KeyboardInterrupt
            tell(console)(text)

        return say

    monkeypatch.setattr(graying, "_teller", interrupt)
    plan = graying.StepsPlan(model="test_vit", image_size=32, batch_size=2, compile=False, edits=["cb"])
    with pytest.raises(KeyboardInterrupt):
        graying.run_steps(plan, CPU, tmp_path, wide(graying.Console(quiet=True)))
    assert [(row.edit, row.rounds) for row in read_steps(tmp_path)] == [("plain", 1), ("cb", 1)]


def test_real_steps() -> None:
    edits = list(steps.USUAL)
    (results,) = measure_steps(RECIPE, edits, CPU, rounds=1, updates=1)
    rows = step_rows(results)
    assert [row.edit for row in rows] == ["plain", *edits]
    assert [row.status for row in rows] == ["ok"] * len(rows), [row.note for row in rows]


@pytest.fixture
def without_inductor(monkeypatch) -> None:
    """Models are traced as ever, and run as they were traced."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


@pytest.mark.usefixtures("without_inductor")
def test_every_compiled_model_runs_its_own_code(monkeypatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(steps, "bare_step", _watched(steps.bare_step, ran))
    compiled = replace(RECIPE, compile=True)
    edits = ["cb", "dct-pixels", "dct-embedding"]  # not cb_s, which starts as cb
    (results,) = measure_steps(compiled, edits, CPU, rounds=1, updates=1)
    assert {name: timed.failure for name, timed in results.items()} == dict.fromkeys(results, "")
    assert len(set(ran)) == len(results)  # no two models gave the same loss


def _watched(bare_step, losses: list[str]):
    """Notes the first loss of each model: equal weights and images, so that only the edit makes it differ."""

    def watched(*arguments):
        torch.manual_seed(0)
        cross_entropy, seen = torch.nn.functional.cross_entropy, []

        def note(*values):
            loss = cross_entropy(*values)
            seen.append(loss)
            if len(seen) == 1:
                losses.append(f"{loss.item():.9f}")
            return loss

        step = bare_step(*arguments)

        def first_noted(updates: int) -> None:
            torch.nn.functional.cross_entropy = note
            try:
                step(updates)
            finally:
                torch.nn.functional.cross_entropy = cross_entropy

        return first_noted

    return watched


@pytest.mark.usefixtures("without_inductor")
def test_a_model_that_runs_the_code_of_another_is_told(monkeypatch) -> None:
    monkeypatch.setattr(steps, "many_programs", contextlib.nullcontext)
    # An edit that leaves no mark on the class, as a hook by hand would be.
    monkeypatch.setattr("wellposed.surgery.insertion.mark", lambda module: None)
    monkeypatch.setattr("wellposed.surgery.padding.mark", lambda module: None)
    (results,) = measure_steps(replace(RECIPE, compile=True), ["cb"], CPU, rounds=1, updates=1)
    assert "compiled nothing of its own" in results["cb"].failure
    assert results["plain"].seconds


def test_an_unknown_edit_is_told() -> None:
    with pytest.raises(ValueError, match=r"edits must be some of spectral-pixels, .*got 'cbs'"):
        measured(["cbs"])
