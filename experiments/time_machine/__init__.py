"""Is a recorded run replayed bit for bit, and what does it cost: runs, their replays and their losses."""
