"""Headwater: make and curate post-training data for language models."""

__version__ = "0.1.0"
