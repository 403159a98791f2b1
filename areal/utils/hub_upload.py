"""Uploads a folder to a model repository of the hub, in one commit.

    url = upload_folder(folder, "org/name", {"README.md": card}, private=True, message="...")

The commit is made when every file has arrived, so nobody sees half a model. Files that arrived
before an interruption are not sent again: the hub knows them by their checksums. The token is
huggingface_hub's (HF_TOKEN, or its login). An error is one line: ValueError for a name or a token,
RuntimeError for the network or the hub.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from areal.utils.hub import endpoint, first_line, is_unreachable

_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)


def upload_folder(
    folder: Path, repo: str, texts: Mapping[str, str], *, private: bool, message: str
) -> str:
    """The address of the commit. `texts` replace files of the folder with these names."""
    from huggingface_hub import CommitOperationAdd, HfApi

    if not _REPOSITORY.fullmatch(repo):
        raise ValueError(f"REPO: {repo!r} is no repository of a hub: expected org/name")
    files = {
        file.relative_to(folder).as_posix(): file
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
    additions = [
        CommitOperationAdd(path, str(file)) for path, file in files.items() if path not in texts
    ]
    additions += [CommitOperationAdd(path, text.encode()) for path, text in texts.items()]
    api = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        return api.create_commit(repo, additions, commit_message=message).commit_url
    except Exception as error:  # the client raises dozens of types, some from its HTTP client
        raise _explained(repo, error) from error


def _explained(repo: str, error: Exception) -> Exception:
    from huggingface_hub import errors

    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    token = "set HF_TOKEN to a token that may write there (or log in: hf auth login)"
    if isinstance(error, errors.LocalTokenNotFoundError) or status in (401, 403):
        return ValueError(f"REPO: {endpoint()} refuses to write {repo}: {token}")
    if isinstance(error, errors.HFValidationError) or status == 404:
        return ValueError(f"REPO: {endpoint()} has no place for {repo!r}: correct the name")
    again = "start again, what has arrived is not sent twice"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return ValueError("REPO: HF_HUB_OFFLINE is set: unset it to upload")
    if is_unreachable(error):
        return RuntimeError(f"REPO: {endpoint()} cannot be reached ({first_line(error)}): {again}")
    return RuntimeError(f"REPO: {repo} could not be uploaded ({first_line(error)}): {again}")
