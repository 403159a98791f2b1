"""The mathematics of training: tensors in, tensors out, no state, no config objects."""
