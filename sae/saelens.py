"""Importing sae-lens without side effects: it brings wandb along, which must neither report nor log."""

from __future__ import annotations

import os
import warnings

from headwater.core.errors import ConfigError


def quiet_sae_lens() -> None:
    """Import sae-lens (some seconds, once per process) with wandb switched off.

    A value that the user set in the environment stays. Raises ConfigError when the extra isn't installed.
    """
    os.environ.setdefault("WANDB_MODE", "disabled")
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import sae_lens  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"Training an SAE, or reading one by its release's name, needs {error.name}.",
            todo="Type: pip install 'headwater[local]'",
        ) from error
