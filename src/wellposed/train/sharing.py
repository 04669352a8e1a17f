"""A run on the Hugging Face Hub: its weights with their model card, and the records it was made of."""

from pathlib import Path
from typing import Any, Literal, cast

from wellposed.run_records import NAME as LOG
from wellposed.train.export import WEIGHTS
from wellposed.train.runs import ENVIRONMENT, RECIPE, RESULT

CARD = "README.md"
_OF_WEIGHTS = (CARD, "config.json", WEIGHTS, RECIPE)
_OF_RUN = (LOG, RESULT, ENVIRONMENT, "graying.json")


def files_of(folder: str | Path, weights: Literal["best", "last"] = "best") -> dict[str, Path]:
    """What is shared of a run's folder: the name in the repository, and the file.

    The weights with their card, configuration and recipe are at the top, so that timm loads the repository
    as ``hf-hub:REPO``; with them come the numbers of the run. Checkpoints and TensorBoard's files stay.

    Args:
        folder: of the run.
        weights: which ones.
    """
    folder = Path(folder).expanduser()
    chosen = folder / weights
    missing = [name for name in _OF_WEIGHTS if not (chosen / name).is_file()]
    if missing:
        why = f"{chosen} has no {missing[0]}" if chosen.is_dir() else f"there is no folder {chosen}"
        raise ValueError(
            f"expected the folder of a run that has its {weights} weights, {why}; finish the run with "
            f"wellposed train --out {folder}, or name another."
        )
    here = {name: chosen / name for name in _OF_WEIGHTS}
    return here | {name: folder / name for name in _OF_RUN if (folder / name).is_file()}


def push(
    folder: str | Path,
    repo: str,
    *,
    weights: Literal["best", "last"] = "best",
    private: bool = False,
    api: Any = None,
) -> str:
    """Put a run into a repository of models on the Hub, which is made if need be, in one commit.

    Args:
        folder: of the run.
        repo: ``"USER/NAME"``.
        weights: ``"best"`` or ``"last"``.
        private: whether a new repository can be seen by its owner alone.
        api: a ``huggingface_hub.HfApi``; None makes one, with the token of ``hf auth login``.

    Returns:
        The address of the commit.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    files = files_of(folder, weights)
    client = HfApi() if api is None else api
    # The Hub's errors are those of the library that it calls the network with.
    network = cast(tuple[type[Exception], ...], (OSError, *HfHubHTTPError.__bases__))
    try:
        client.create_repo(repo, repo_type="model", private=private, exist_ok=True)
        commit = client.create_commit(
            repo,
            operations=[CommitOperationAdd(name, str(file)) for name, file in files.items()],
            commit_message=f"The {weights} weights of {Path(folder).resolve().name}, with their run",
            repo_type="model",
        )
    except HFValidationError as error:
        raise ValueError(f"expected a repository such as USER/NAME, got {repo!r}: {error}") from error
    except network as error:
        raise ConnectionError(
            f"the Hub did not take {repo} ({str(error).splitlines()[0].rstrip('.')}); `hf auth login` stores "
            "a token, which needs write access to that repository."
        ) from error
    return str(commit.commit_url)
