"""Validation of weights: subset and full split."""
