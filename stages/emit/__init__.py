"""Stages that hand rows out: the published dataset."""
