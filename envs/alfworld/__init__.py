"""ALFWorld: text games of household tasks, played in the real TextWorld engine."""
