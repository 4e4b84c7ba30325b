"""Floor 6: what a person runs: the `pipeline` command and one recipe per pipeline."""
