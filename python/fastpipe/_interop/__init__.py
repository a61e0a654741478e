"""Code that adapters share: tensors, memory of devices, ranks."""
