"""Importing sae-lens without side effects: it brings wandb along, which must neither report nor log."""

from __future__ import annotations

import os
import warnings


def quiet_sae_lens() -> None:
    """Import sae-lens (some seconds, once per process) with wandb switched off.

    A value that the user set in the environment stays.
    """
    os.environ.setdefault("WANDB_MODE", "disabled")
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import sae_lens  # noqa: F401
