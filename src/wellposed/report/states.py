"""How a run ended, in words: what is not finished counts in no mean, and is marked wherever it is shown."""

from collections.abc import Mapping, Sequence
from typing import Any

COLLAPSED, NOT_FINISHED = "collapsed", "not finished"
_BESIDE = ("note", "warning", "checkpoint", "torn")
"""Events that may follow the one that ended a run."""
_ENDS = {
    "terminated": "stopped by a signal",
    "nonfinite": "stopped by a loss that is not finite",
    "error": "stopped by an error",
}


def state_of_run(lines: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> str:
    """Of ``run.jsonl``.

    Args:
        lines: as :func:`wellposed.run_records.read_run` gives them.
        summary: of :func:`wellposed.run_records.summarise`.

    >>> state_of_run([{"event": "terminated"}, {"event": "note"}], {"finished": False, "updates": 30})
    'not finished: stopped by a signal at update 30'
    """
    # An update that was left out did not end the run.
    told = [line["event"] for line in lines if line["event"] not in _BESIDE and "left_out" not in line]
    how = _ENDS.get(told[-1] if told else "", "running or killed")
    return state(summary, f"{how} at update {summary['updates']}")


def state(summary: Mapping[str, Any], why_not: str) -> str:
    """In words.

    Args:
        summary: with ``finished``, and ``collapsed`` where it is known.
        why_not: what became of a run that is not finished.

    >>> state({"finished": True, "collapsed": True}, "")
    'finished, collapsed'
    """
    if not summary["finished"]:
        return f"{NOT_FINISHED}: {why_not}"
    return f"finished, {COLLAPSED}" if summary.get("collapsed") else "finished"


def mark(summary: Mapping[str, Any]) -> str:
    """What a reader must know beside the name; empty for a whole run, and for a diagnosis without summary.

    >>> mark({}), mark({"finished": False})
    ('', 'not finished')
    """
    if not summary.get("finished", True):
        return NOT_FINISHED
    return COLLAPSED if summary.get("collapsed") else ""
