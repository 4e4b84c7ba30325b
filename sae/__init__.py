"""Floor 3: the feature space. Load, train and measure sparse autoencoders; extract and compare features."""
