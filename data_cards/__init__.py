"""Floor 3: describing a dataset, as a Hub data card and as a static HTML report."""
