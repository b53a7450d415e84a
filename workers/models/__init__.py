"""Plain single-device models with seams, which `workers.parallel` fills from outside."""
