"""The attention classes whose query was taught: a run finds that of the others, see
:mod:`wellposed.anatomy.queries`.
"""

from wellposed.anatomy.rows import AttentionRow

ATTENTIONS: dict[str, AttentionRow | str] = {}
"""By the class's full name; a sentence says why its heads cannot be uniform."""
