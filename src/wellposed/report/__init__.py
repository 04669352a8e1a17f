"""Records -> a page that opens offline. Reads records only, never a model.

``wellposed report RUN_OR_DIAGNOSIS... -o report.html`` is :func:`write_report`.
"""

from wellposed.report.folders import read_material
from wellposed.report.material import Material, Subject
from wellposed.report.page import LIMIT, diagnosis_page, read_data, report_page, write_report

__all__ = [
    "LIMIT",
    "Material",
    "Subject",
    "diagnosis_page",
    "read_data",
    "read_material",
    "report_page",
    "write_report",
]
