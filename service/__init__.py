"""Keeps jobs running: contracts, a pure core that decides, a store, and a runtime on Ray that does."""
