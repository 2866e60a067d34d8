"""Gymnasium environments as games of text: what is seen is printed, what is done is read from the model's turn."""
