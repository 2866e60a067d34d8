"""`fresco env check`: what an environment must hold before a model is trained in it."""
