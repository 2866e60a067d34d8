"""`fresco report RUN …`: one HTML file that shows runs, by itself and offline.

`gather` reads a run's folder, `samples` its conversations, `timeline` its trace; `page` writes the file.
"""
