"""Whatever holds the weights and updates them."""
