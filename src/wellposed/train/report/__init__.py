"""What a run tells: the bar, ``run.jsonl``, trackers, the table at its end and ``result.json``."""

from wellposed.train.report.reporter import Reporter
from wellposed.train.report.result import write_json
from wellposed.train.report.run_log import read_run
from wellposed.train.report.summary import summarise
from wellposed.train.report.table import EndTable
from wellposed.train.report.trackers import tracker_names

__all__ = ["EndTable", "Reporter", "read_run", "summarise", "tracker_names", "write_json"]
