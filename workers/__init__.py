"""One rank of a training job. Imports nothing of `service` or `api`; runs under Ray actors or alone under torchrun."""
