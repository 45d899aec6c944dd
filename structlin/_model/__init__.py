"""A user's model: its linear layers and their roles, the patterns that select them, what each
parameter is, how it is called, the loss over its head, and its files."""
