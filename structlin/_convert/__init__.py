"""A user's model, changed: planned, converted and back, widened, rounded, and told in a table."""
