"""What graying does to an image: before, after and the difference, for several eps."""

from typing import Any

from wellposed.graying_pictures import together
from wellposed.report.charts import Budget, Chart, Missing, Section, columns
from wellposed.report.subjects import Material

TITLE = "What graying does to an image"
_TITLES = {"spectral": "Spectral", "svd": "SVD", "dct": "DCT"}


def graying_section(material: Material, budget: Budget) -> Section | Missing:
    """Rows of numbers, and in ``extra`` a picture for each image and eps."""
    grays_first = sorted(
        material.subjects, key=lambda subject: not any("graying" in edit for edit in subject.edits)
    )
    shown = material.graying or together([each.graying for each in grays_first if each.graying])
    if shown is None:
        return Missing(TITLE, "wellposed report RUN_OR_DIAGNOSIS... --images DIR")
    rows: list[tuple[Any, ...]] = []
    pictures: list[dict[str, Any]] = []
    for image in shown.images:
        steps = [{"label": "before", "src": image.picture}]
        for step in image.grayed:
            before = (image.kappa, image.status)
            rows.append((image.name, shown.method, step.eps, *before, step.kappa, step.status, step.change))
            steps.append({"label": f"eps {step.eps:g}", "src": step.picture})
            steps.append({"label": f"difference, eps {step.eps:g}", "src": step.difference})
        pictures.append({"name": image.name, "steps": steps})
    chart = Chart(
        columns=columns(
            image="image",
            method="method",
            eps="eps",
            before="kappa before",
            before_status="status before",
            after="kappa after",
            after_status="status after",
            change="largest change of a pixel",
        ),
        rows=tuple(rows),
        spec=None,
        describe="Condition numbers of the patch matrices before and after graying.",
    )
    words = (
        f"{_TITLES.get(shown.method, shown.method)} graying of the pixel patches ({shown.patch} x "
        f"{shown.patch}), shown on {shown.source}. After graying, values outside 0 to 1 are cut off for the "
        "picture. In a difference, grey is no change, and black and white are the largest change of that "
        "image, which the table has.",
    )
    extra = {"pictures": pictures}
    return Section(id="graying", title=TITLE, words=words, chart=chart, extra=extra)
