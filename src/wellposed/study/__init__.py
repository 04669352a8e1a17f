"""Each figure and table of the two papers as a study: a grid of runs, and what is read off their records."""

from wellposed.study.plan import Cell, RunRecord, Scale, Study, StudyRecords, StudyReport

__all__ = ["Cell", "RunRecord", "Scale", "Study", "StudyRecords", "StudyReport"]
