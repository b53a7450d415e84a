"""The same core in virtual time: faults in, goodput out. No Ray, torch, clock or store.

What is decided, `service.core.machine.decide` decides; what the runtime would answer, and after how long, is made up
here from durations that are given or were measured.
"""
