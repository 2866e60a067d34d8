"""The files that `fresco init` copies into a user's folder, beside its recipe and its rows."""
