"""Whether a job can begin with the weights of a Hugging Face folder: its config.json is read, and no tensor."""

from __future__ import annotations

import json

import fsspec.core

from api import checks
from service.contracts import errors
from service.contracts.job import JobSpec
from workers.models import families

FIELD = "init_from.huggingface"


def check(spec: JobSpec, uri: str) -> None:
    """UserError: it is no such folder, or its model is another one."""
    checks.normal(uri, FIELD)
    try:
        filesystem, path = fsspec.core.url_to_fs(uri)
        config = json.loads(filesystem.cat_file(f"{path.rstrip('/')}/config.json"))
    except Exception as error:  # each storage library has its own errors, and each is the answer here
        raise errors.UserError(
            f"{FIELD}: {uri} can't be read from the API: {type(error).__name__}: {error}",
            hint="a folder that save_pretrained wrote is wanted, at a path or URI that every node can read",
            field=FIELD,
        ) from error
    try:
        theirs = families.spec_from_config(config, spec.model.seq_len)
    except (families.Unsupported, ValueError) as error:
        raise errors.UserError(f"{FIELD}: {error}", hint="see the model's config.json", field=FIELD) from None
    vocabulary = spec.model.vocab_size or 0
    if problems := families.differences(spec.model, theirs, vocabulary):
        hint = f"model.vocab_size is {theirs.vocab_size} there, or more here"
        raise errors.UserError(f"{FIELD}: {'; '.join(problems)}", hint=hint, field=FIELD)
