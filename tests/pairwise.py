"""A few of all combinations of settings, so that what one or two settings break still fails a test."""

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import combinations


def covering(rows: Sequence[Sequence[Hashable]], strength: int) -> list[int]:
    """The places of the rows that together hold every group of ``strength`` values that some row holds.

    Greedy, and the same for the same rows: the next is the one with most groups that no row before it had;
    of those the one whose groups were used least, and of those the first.

    >>> rows = [(a, b, c) for a in "ab" for b in "ab" for c in "ab"]
    >>> ["".join(rows[i]) for i in covering(rows, 2)]
    ['aaa', 'abb', 'bab', 'bba']
    """
    groups = [set(combinations(enumerate(row), min(strength, len(row)))) for row in rows]
    missing = set().union(*groups)
    used: Counter[tuple[tuple[int, Hashable], ...]] = Counter()
    chosen = []
    while missing:
        place = max(
            range(len(rows)),
            key=lambda i: (len(groups[i] & missing), -sum(used[group] for group in groups[i]), -i),
        )
        chosen.append(place)
        missing -= groups[place]
        used.update(groups[place])
    return sorted(chosen)
