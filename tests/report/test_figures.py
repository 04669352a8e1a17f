"""Pictures of graying, the charts of a notebook, and the command."""

import base64
import io
import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import report_material as make
import short_runs
from wellposed.cli import app
from wellposed.nn import PixelGraying
from wellposed.probes.diagnosis import Diagnosis
from wellposed.probes.gray_images import gray_folder
from wellposed.report import read_data, read_material, report_page
from wellposed.report.charts import Budget
from wellposed.report.measurements import graying_section


def _pixels(uri: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))))


def test_pictures_show_what_graying_does(tmp_path: Path) -> None:
    make.write_run(tmp_path / "run", recipe='graying = "spectral"\neps = 0.6\n')
    section = graying_section(read_material([tmp_path / "run"]), Budget())
    assert section.extra
    steps = {step["label"]: _pixels(step["src"]) for step in section.extra["pictures"][0]["steps"]}
    assert list(steps)[:3] == ["before", "eps 0.9", "difference, eps 0.9"]
    assert "eps 0.6" in steps  # the run's own
    image = make.digits()[:1].float()
    grayed = PixelGraying(2, 0.6, "spectral")(image).clamp(0, 1)[0, 0] * 255
    assert np.abs(steps["eps 0.6"].astype(float) - grayed.numpy()).max() <= 2
    assert section.chart
    row = next(row for row in section.chart.records() if row["eps"] == 0.6)
    assert row["after"] < row["before"]


def test_images_of_a_folder_and_of_the_runs_own_data(tmp_path: Path) -> None:
    colours = torch.randint(
        0, 255, (40, 50, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    for label in ("cat", make.HOSTILE_FOLDER):
        (tmp_path / "set" / label).mkdir(parents=True)
        Image.fromarray(colours.numpy()).save(tmp_path / "set" / label / f"{label[:3]}.png")
    (tmp_path / "set" / "cat" / "a.jpg").write_bytes(b"no image")
    make.write_run(tmp_path / "run", data=str(tmp_path / "set"))
    material = read_material([tmp_path / "run"])
    assert material.subjects[0].graying
    section = graying_section(replace(material, graying=gray_folder(tmp_path / "set")), Budget())
    assert section.extra
    assert len(section.extra["pictures"]) == 1  # of the folder cat the first file is broken
    assert _pixels(section.extra["pictures"][0]["steps"][0]["src"]).shape == (96, 96, 3)
    with pytest.raises(ValueError, match="found none"):
        gray_folder(tmp_path / "run")
    page = tmp_path / "page.html"
    arguments = ["report", str(tmp_path / "run"), "--images", str(tmp_path / "set"), "-o", str(page)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert {row["image"] for row in read_data(page.read_text())["graying"]} == {
        f"{make.HOSTILE_FOLDER[:3]}.png"
    }


def test_a_run_without_pictures_says_what_adds_them(tmp_path: Path) -> None:
    make.write_run(tmp_path / "far", data="cifar10:nowhere")
    (tmp_path / "far" / "graying.json").write_text('{"images": [{"picture": "https://elsewhere"}]}')
    material = read_material([tmp_path / "far"])
    assert "expected pictures of graying" in material.damage[0].what
    assert graying_section(material, Budget()).remedy.endswith("--images DIR")
    (tmp_path / "far" / "graying.json").unlink()
    material = read_material([tmp_path / "far"])
    assert not material.damage
    assert "What graying does to an image: <code>" in report_page(material)


def test_a_run_keeps_what_graying_does_to_its_images(tmp_path: Path) -> None:
    short_runs.run(tmp_path / "run", graying="dct", eps=0.8)
    material = read_material([tmp_path / "run"])
    section = graying_section(material, Budget())
    assert section.extra
    assert len(section.extra["pictures"]) == 3
    assert {(row["method"], row["eps"]) for row in section.chart.records()} == {
        ("dct", eps) for eps in (0.9, 0.8, 0.7, 0.5)
    }
    assert "test images of digits" in section.words[0]


def test_the_command(tmp_path: Path) -> None:
    make.write_run(tmp_path / "run")
    out = tmp_path / "made" / "page.html"
    result = CliRunner().invoke(app, ["report", str(tmp_path / "run"), "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert "1 runs and diagnoses" not in result.output
    assert read_data(out.read_text(encoding="utf-8"))["training"]
    missing = CliRunner().invoke(app, ["report", str(tmp_path / "nothing")])
    assert missing.exit_code == 1
    assert "there is no" in missing.output


def test_the_command_names_damaged_files(tmp_path: Path) -> None:
    for name in ("damaged", "whole"):
        make.write_run(tmp_path / "runs" / name)
    path = tmp_path / "runs" / "damaged" / "result.json"
    path.write_text("{")
    out = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["report", str(tmp_path / "runs"), "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert f"warning: {path}: expected a JSON object" in result.output
    assert {row["run"] for row in read_data(out.read_text())["training"]} == {"damaged", "whole"}


def test_a_diagnosis_as_page_and_in_a_notebook(tmp_path: Path) -> None:
    diagnosis = Diagnosis(tuple(make.records()), {"model": "a<b", "images": 4})
    page = diagnosis.to_html(tmp_path / "d.html")
    assert (tmp_path / "d.html").read_text(encoding="utf-8") == page
    assert page == report_page_of(diagnosis, tmp_path)
    shown = diagnosis._repr_html_()
    assert shown.count("<svg") == 2
    assert "block 1, attention.branch: 6.926" in shown
    assert "<script" not in shown
    assert "a<b" not in shown
    drawing = shown[shown.index("<svg") : shown.index("</svg>") + 6]
    assert len(ElementTree.fromstring(drawing).findall("{*}rect")) == 2 * len(make.POSITIONS)
    assert Diagnosis(())._repr_html_()


def report_page_of(diagnosis: Diagnosis, folder: Path) -> str:
    """The page by way of the file."""
    diagnosis.to_json(folder / "d.json")
    content = json.loads((folder / "d.json").read_text())
    assert content["about"]["model"] == "a<b"
    (folder / "a<b.json").write_text(json.dumps(content))
    return report_page(read_material([folder / "a<b.json"]), title="diagnosis of a<b")
