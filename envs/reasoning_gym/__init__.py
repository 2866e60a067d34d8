"""Every data set of the reasoning-gym package: one question, one answer, scored by the data set."""
