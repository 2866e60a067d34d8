"""Kill anything, always: a schedule of faults from a seed, played on a run; what must hold afterwards; what it cost."""
