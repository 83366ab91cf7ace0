"""What to say about an exception of the user's model, loss or data."""
