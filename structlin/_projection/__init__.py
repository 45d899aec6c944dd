"""The mathematics of one matrix: a dense matrix -> the cores of a structure, and what each size of
a structure would lose of it. Nothing here knows of models."""
