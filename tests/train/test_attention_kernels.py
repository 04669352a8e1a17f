import pytest
import torch

from wellposed.train import fitting
from wellposed.train.parallel import without_cudnn_attention
from wellposed.train.recipe import Recipe


def enabled() -> bool:
    return bool(torch.backends.cuda.cudnn_sdp_enabled())


@pytest.mark.parametrize("before", [True, False])
def test_the_callers_choice_comes_back(before) -> None:
    was = enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(before)
        with without_cudnn_attention():
            assert not enabled()
        assert enabled() == before
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was)


def test_a_run_trains_without_cudnn(tmp_path, monkeypatch) -> None:
    seen = []
    resolve = fitting.resolve

    def watched(*given):
        seen.append(enabled())
        return resolve(*given)

    monkeypatch.setattr(fitting, "resolve", watched)
    recipe = Recipe(epochs=1, limit=64, batch_size=32, trackers=(), device="cpu", monitor_every=0)
    fitting.fit(recipe, out=tmp_path, quiet=True)
    assert seen == [False]
