"""A console that people can read: each message once, from rank 0, without what is expected."""

import logging
import os
import warnings

EXPECTED_WARNINGS = (
    r"Found \d+ module\(s\) in eval mode",  # frozen components are in eval mode for ever
    r".*isinstance\(treespec, LeafSpec\).*",  # between Lightning and torch
    r"The '\w+_dataloader' does not have many workers",  # the recipes' data is in memory
)
QUIET_LIBRARIES = {
    "WANDB_QUIET": "true",  # the summary says where its run is
    "TRANSFORMERS_VERBOSITY": "error",  # it reports the pooler that is left out at length
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
EXPECTED_MESSAGES = ("Tip: For seamless cloud", "All distributed processes registered")


def quiet_libraries() -> None:
    """Ask libraries to be quiet, unless the user chose; they look when they are imported."""
    for name, value in QUIET_LIBRARIES.items():
        os.environ.setdefault(name, value)


def configure_console() -> None:
    """Tidy the handlers that Hydra and Lightning installed; other ranks print warnings only."""
    logging.getLogger("lightning").handlers.clear()  # Hydra's root handlers print it already
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # it announces its font cache
    if os.environ.get("LOCAL_RANK", "0") != "0":
        for handler in logging.getLogger().handlers:
            if not isinstance(handler, logging.FileHandler):
                handler.setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_is_news)
    for message in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)


def _is_news(record: logging.LogRecord) -> bool:
    return not any(text in record.getMessage() for text in EXPECTED_MESSAGES)
