"""Floor 3: describing a dataset. The data card for the Hub, and the report for a person, from plain frozen values."""
