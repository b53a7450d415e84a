"""Decides: state and event in, state and commands out. Reads no clock, environment, disk or network."""
