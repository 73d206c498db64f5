"""Errors of the hub's libraries as one line."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from residual_mass.inputs.hub_folder import in_one_line

AGAIN = "check the network and run prefetch again, which resumes"
NO_DATA_SET = "DatasetNotFoundError"
"""Of the library `datasets`, which those who fetch models alone need not have."""


@contextmanager
def asking(repository: str, remedy: str = AGAIN) -> Iterator[None]:
    """Turns errors of the hub's libraries into a ValueError of one line without the token.

    Wrap only their calls in it, because it catches all exceptions: the libraries raise a dozen unrelated classes.

    Args:
        remedy: what to do about errors other than of access and names.
    """
    from huggingface_hub import get_token

    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise
        message = _message(repository, error, remedy)
        raise ValueError(message.replace(token, "(the token)") if (token := get_token()) else message) from None


def _message(repository: str, error: Exception, remedy: str) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        access = "accept its licence on its page on the hub, then set HF_TOKEN or run `hf auth login`"
        return f"{repository}: access is restricted: {access}"
    if isinstance(error, (errors.RevisionNotFoundError, errors.RemoteEntryNotFoundError)):
        return f"{repository}: the hub no longer has the commit, or a file of it ({in_one_line(error)}); choose another"
    if isinstance(error, errors.RepositoryNotFoundError) or type(error).__name__ == NO_DATA_SET:
        return f"{repository}: not on the hub, or private: check the name, or log in with `hf auth login`"
    return f"{repository}: cannot be fetched ({in_one_line(error)}); {remedy}"
