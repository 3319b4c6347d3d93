"""Learning-rate schedules, parameter groups, clipping and optimizers."""
