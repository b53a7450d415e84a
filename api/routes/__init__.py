"""One file a noun of the REST interface. Routes read the store and write intents; they decide nothing."""
