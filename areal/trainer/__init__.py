"""Trainers: the training loops and the parts they call."""
