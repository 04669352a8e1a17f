"""The state of a run in a line of text."""

from dataclasses import dataclass

from wellposed.records import short


@dataclass
class Status:
    """The newest numbers of a run; None where there are none yet."""

    loss: float | None = None
    accuracy: float | None = None
    test_accuracy: float | None = None
    test_loss: float | None = None
    rate: float | None = None

    def parts(self, elapsed: float, left: float | None) -> list[str]:
        """For a bar or a line of a log, the most wanted first.

        >>> ", ".join(Status(loss=0.25, accuracy=0.9, test_accuracy=0.875, rate=12345.6).parts(62, 3725))
        'loss 0.25, test 87.5%, 1:02:05 left, 12,346 images/s, train 90.0%, 1:02 so far'
        """
        parts = []
        if self.loss is not None:
            parts.append(f"loss {short(self.loss)}")
        if self.test_accuracy is not None:
            parts.append(f"test {percent(self.test_accuracy, 1)}")
        elif self.test_loss is not None:
            parts.append(f"test loss {short(self.test_loss)}")
        if left is not None:
            parts.append(f"{duration(left)} left")
        if self.rate is not None:
            parts.append(f"{rate(self.rate)} images/s")
        if self.accuracy is not None:
            parts.append(f"train {percent(self.accuracy, 1)}")
        return [*parts, f"{duration(elapsed)} so far"]


def time_left(update: int, updates: int, start: int, elapsed: float) -> float | None:
    """Seconds to the last update, at the pace since ``start``.

    >>> time_left(update=150, updates=200, start=100, elapsed=10.0), time_left(100, 200, 100, 10.0)
    (10.0, None)
    """
    done = update - start
    return None if done < 1 else (updates - update) * elapsed / done


def duration(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> duration(5), duration(62), duration(3725.4), duration(200_000)
    ('0:05', '1:02', '1:02:05', '2 d 7:33:20')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if not hours:
        return f"{minute}:{second:02}"
    return (f"{days} d " if days else "") + f"{hour}:{minute:02}:{second:02}"


def rate(value: float) -> str:
    """Images in a second.

    >>> rate(3.14159), rate(40_123.4)
    ('3.14', '40,123')
    """
    return f"{value:,.0f}" if value >= 100 else short(value)


def percent(share: float, digits: int = 2) -> str:
    """A share as a percentage.

    >>> percent(0.98765)
    '98.77%'
    """
    return f"{100 * share:.{digits}f}%"
