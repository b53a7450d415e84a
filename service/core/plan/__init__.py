"""Chooses a layout for a job. Pure: a spec and a fleet in, a layout and a reason out."""
