"""What a run has on CPUs only: nothing on GPUs needs to know of it."""
