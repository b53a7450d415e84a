"""The window: REST over the store, the client, the command line. Loads neither Ray nor torch."""
