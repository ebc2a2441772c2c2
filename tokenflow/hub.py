"""Where the files of models and router heads are: here, or on the model hub."""

from __future__ import annotations

from pathlib import Path

from tokenflow.errors import ModelNotFound
from tokenflow.settings import settings

_WEIGHTS = "*.safetensors"
_WANTED = ["*.json", _WEIGHTS, "*.jinja", "*.model", "merges.txt", "vocab.txt"]
# Copies of the weights in other layouts.
_UNWANTED = ["*/*.json", "*/*.safetensors", "*/*.model", "consolidated*.safetensors"]
_HEADS = ["*.pt", "*.pth"]


def resolve(path: str, *, weights: bool = True) -> Path:
    """The directory with the model's files; a hub id is fetched first, into the hub's own cache.

    A directory that exists wins over a hub id of the same name.  The hub's settings hold (``HF_HOME``,
    ``HF_TOKEN``, ``HF_ENDPOINT``, ``HF_HUB_OFFLINE``), and what is in its cache needs no network.  May take
    long: call it in a thread.

    :param path: a directory in Hugging Face layout, or a hub id (``owner/name``).
    :param weights: fetch the weights as well, not the tokenizer and the configuration only.
    :raises ModelNotFound: if it is neither, or cannot be fetched; says what was tried and what to do.
    """
    directory = Path(path).expanduser()
    if directory.is_file():
        raise ModelNotFound(f"{path} is a file; name the directory that holds the model's config.json")
    if not directory.is_dir():
        wanted = _WANTED if weights else [pattern for pattern in _WANTED if pattern != _WEIGHTS]
        directory = _fetch(path, path, "a local directory", wanted, _UNWANTED)
    if not (directory / "config.json").is_file():
        raise ModelNotFound(f"{directory} has no config.json, so it is not a model in Hugging Face layout")
    return directory


def resolve_head(path: str) -> Path:
    """The file or the directory of a router head; what is on the hub is fetched first, as for models.

    :param path: a file, a directory, or a hub id that a path inside may follow, ``owner/name/file.pt``.
    :raises ModelNotFound: if there is no such thing, or it cannot be fetched.
    """
    local = Path(path).expanduser()
    if local.exists():
        return local
    owner, name, *inside = f"{path}/".split("/", 2)
    repo_id, wanted = f"{owner}/{name}", inside[0].strip("/") if inside else ""
    patterns = [wanted, f"{wanted}/*"] if wanted else _HEADS
    found = _fetch(path, repo_id, "a local file or directory", patterns, []) / wanted
    if not found.exists():
        raise ModelNotFound(f"there is no {path} here, and {repo_id} on the hub has no {wanted}")
    return found


def _fetch(path: str, repo_id: str, local: str, wanted: list[str], unwanted: list[str]) -> Path:
    """The folder with the wanted files of a repository on the hub.

    :param path: what the recipe has, which is no ``local`` path.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    hub, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    offline = settings().hub_offline or constants.HF_HUB_OFFLINE
    here = "" if Path(path).is_absolute() else f" (from {Path.cwd()})"
    tried = f"there is no {local.removeprefix('a local ')} {path}{here}, and"
    try:
        folder = snapshot_download(
            repo_id, allow_patterns=wanted, ignore_patterns=unwanted, local_files_only=offline
        )
    except HFValidationError as error:
        raise ModelNotFound(f"{tried} it is not a hub id (owner/name) either; check the spelling") from error
    except GatedRepoError as error:
        raise ModelNotFound(
            f"{tried} on the hub it is gated: accept its terms at {hub}/{repo_id}, then set HF_TOKEN or log "
            "in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"{tried} {hub} has no model of that name for you; check the spelling, or set HF_TOKEN if it is "
            "private"
        ) from error
    except LocalEntryNotFoundError as error:
        if offline:
            raise ModelNotFound(
                f"{tried} the cache {cache} does not hold all of it, while HF_HUB_OFFLINE forbids to fetch; "
                f"unset it, or give {local}"
            ) from error
        cause = error.__cause__ or error
        raise ModelNotFound(
            f"{tried} it is not in the cache {cache} and cannot be fetched from {hub} "
            f"({type(cause).__name__}: {cause}); check the network, or give {local}"
        ) from error
    except Exception as error:  # of the HTTP library, which differs between versions of huggingface_hub
        raise ModelNotFound(
            f"{tried} it cannot be fetched from {hub} ({type(error).__name__}: {error})"
        ) from error
    return Path(folder)
