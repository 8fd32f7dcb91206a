"""What query tokens add to the gradients of the rows that they have chosen."""
