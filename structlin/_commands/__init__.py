"""The commands of `structlin` and `python -m structlin`, imported when one runs."""
