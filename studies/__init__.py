"""The studies: each figure or table of the two papers, and questions beyond them, in a folder of its own.

A folder has the study's code (``study.py``), a README with the verdict of each claim, and for each scale the
records, tables and figure that it follows from. ``python -m studies NAME`` runs one, or resumes it.
"""
