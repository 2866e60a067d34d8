"""The seam "model": everything that knows an architecture. The rest of Fresco sees `rl.models.protocol`."""
