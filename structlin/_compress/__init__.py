"""A trained model, smaller: what runs a user's model on data."""
