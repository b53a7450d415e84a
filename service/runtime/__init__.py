"""Does what the core decided; the only folder that imports Ray."""
