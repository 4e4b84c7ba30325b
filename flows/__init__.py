"""Floor 5: one Prefect flow per pipeline: which stages, in what order."""
