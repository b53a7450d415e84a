"""What a node can tell of its own health: its GPUs by NVML, the kernel's log, its ports. Knows no Ray and no jobs."""
