"""The loops a user reads first, and what they call: one folder or file per algorithm family."""
