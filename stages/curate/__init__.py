"""Stages that bring rows in: loading, cleaning, choosing."""
