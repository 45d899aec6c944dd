"""Reading a user's model: its linear layers and their roles, the patterns that select them, what
each parameter is."""
