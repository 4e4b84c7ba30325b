"""Floor 3: judging an answer."""
