"""A model's tokenizer, from its folder or the hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvcal_artifacts.errors import ModelUnavailable

from . import hub
from .configuration import check_config, config_path
from .hub import one_line
from .names import ModelSource
from .quiet import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_NAMES = 6  # of files that a message shows


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """The model's tokenizer. Raises ModelUnavailable, for a config.json that cannot be used first."""
    check_config(source)
    return read_tokenizer(source)


def read_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """The tokenizer of a model whose config.json has been checked. Raises ModelUnavailable."""
    from transformers import AutoTokenizer

    if source.kind == "hub":
        assert source.hub_id is not None
        sha = hub.revision_of(config_path(source))
        folder = hub.fetch_tokenizer(source.hub_id, sha)
    else:
        assert source.folder is not None
        folder = source.folder
    if not any((folder / name).is_file() for name in hub.TOKENIZER_FILES):
        raise ModelUnavailable(_no_tokenizer(source, folder))
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # damaged JSON, unknown class, a missing optional package
        if not any((folder / name).is_file() for name in hub.VOCABULARIES):  # a template or settings alone
            raise ModelUnavailable(_no_tokenizer(source, folder)) from error
        raise ModelUnavailable(f"{source.label}: its tokenizer cannot be read ({one_line(error)})") from error


def _no_tokenizer(source: ModelSource, folder: Path) -> str:
    """What a folder without a vocabulary has, and what to do."""
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    shown = ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")
    return (
        f"{source.label}: no tokenizer in {folder}, which holds {shown or 'no file'}; "
        "needed is tokenizer.json or tokenizer.model: copy it from where the model is from, or write it with "
        "tokenizer.save_pretrained(...)"
    )


def local_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase | None:
    """The tokenizer where it lies on this machine for certain; with random weights no model needs one.

    The model's config.json must have been checked, as for `read_tokenizer`.
    """
    has = source.folder is not None and any((source.folder / name).is_file() for name in hub.TOKENIZER_FILES)
    return read_tokenizer(source) if has else None
