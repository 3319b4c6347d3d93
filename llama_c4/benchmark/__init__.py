"""Measurements: two things in one run."""
