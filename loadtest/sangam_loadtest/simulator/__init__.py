"""Discrete-event simulation: the real lifecycle, placement and scheduler under virtual time."""
