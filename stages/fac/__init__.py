"""Stages of FAC Synthesis: from an SAE to rows that fire the features a dataset lacks."""
