"""The command line: one file a group of commands. The only place on this side that reads the environment."""
