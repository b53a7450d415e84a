"""Training state on storage. `storage`, `shards` and `manifest` load no torch; `logical` and `saver` do."""
