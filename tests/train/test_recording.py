"""Passes that are recorded once and replayed; here with a recorder that needs no GPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from wellposed.train.batches import Batch
from wellposed.train.parallel import WARM_UP, CudaRecorder, RecordedPass, is_recorded_here
from wellposed.train.recipe import Recipe


class Fake:
    """Replays by running the function again and writing to the memory of the first time, as a graph does."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.recordings = self.launches = 0

    def launch(self, function: Callable[[], object]) -> object:
        self.launches += 1
        return function()

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        self.recordings += 1
        assert all(parameter.grad is None for parameter in self.parameters)
        function()
        first = [parameter.grad for parameter in self.parameters]

        def replay() -> None:
            for parameter in self.parameters:
                parameter.grad = None
            function()
            for parameter, gradient in zip(self.parameters, first, strict=True):
                gradient.copy_(parameter.grad)
                parameter.grad = None

        return replay


def passes(count: int, seed: int = 0) -> list[tuple[Tensor, Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(6, 4, generator=draw),
            torch.randint(0, 3, (6,), generator=draw),
            torch.rand(6, 1, generator=draw),
        )
        for _ in range(count)
    ]


def make(takes_noise: bool) -> tuple[nn.Linear, RecordedPass, Fake]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    parameters = list(model.parameters())

    def work(inputs: tuple[Tensor, ...], batch: Batch) -> tuple[Tensor, Tensor]:
        images, *noise = inputs
        logits = model(images + noise[0] if noise else images)
        loss = nn.functional.cross_entropy(logits, batch.labels) + batch.images.mean()
        loss.backward()
        return loss.detach(), (logits.argmax(1) == batch.labels).sum()

    fake = Fake(parameters)
    return model, RecordedPass(work, parameters, fake.launch, fake.record), fake


@pytest.mark.parametrize("takes_noise", [False, True])
def test_every_pass_is_that_of_its_own_batch(takes_noise: bool) -> None:
    model, recorded, fake = make(takes_noise)
    reference, plain, _ = make(takes_noise)
    for images, labels, noise in passes(WARM_UP + 4):
        batch = Batch(images, labels)
        inputs = (images, noise) if takes_noise else (images,)
        loss, correct = recorded(inputs, batch)
        expected, expected_correct = plain.work(inputs, batch)
        assert torch.equal(loss, expected)
        assert torch.equal(correct, expected_correct)
        for own, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(own.grad, other.grad)
            own.data -= 0.1 * own.grad
            other.data -= 0.1 * other.grad
            own.grad = other.grad = None  # as the loop does
    assert (fake.launches, fake.recordings) == (WARM_UP, 1)


def test_a_batch_of_another_size_is_refused() -> None:
    model, recorded, _ = make(takes_noise=False)
    for images, labels, _ in passes(WARM_UP + 1):
        model.zero_grad()
        recorded((images,), Batch(images, labels))
    images = torch.zeros(1, 4)
    with pytest.raises(RuntimeError, match=r"recorded one, \(6, 4\), got \(1, 4\).*compile_blocks=false"):
        recorded((images,), Batch(images, torch.zeros(1, dtype=torch.long)))


def test_no_more_than_two_replays_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Event:
        after: str | None = None

        def __init__(self, blocking: bool) -> None:
            assert blocking

        def record(self, stream: object) -> None:
            self.after = done[-1]

        def synchronize(self) -> None:
            if self.after is not None:
                done.append(f"{self.after} has ended")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    recorder = object.__new__(CudaRecorder)
    recorder.device = torch.device("cuda")
    names = iter("abcd")
    replay = recorder._paced(lambda: done.append(next(names)))
    for _ in range(4):
        replay()
    assert done == ["a", "b", "a has ended", "c", "b has ended", "d"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"compile_blocks": True}, True),
        ({}, False),
        ({"compile_blocks": True, "compile": False}, False),
        ({"compile_blocks": True, "edits": ["gray_tokens method=svd"]}, False),
        ({"compile_blocks": True, "accumulate": 2}, False),
    ],
)
def test_what_is_recorded(fields: dict[str, object], expected: bool) -> None:
    recipe = Recipe.from_mapping({"compile": True} | fields)
    assert is_recorded_here(recipe, torch.device("cuda")) is expected
    assert not is_recorded_here(recipe, torch.device("cpu"))
