"""What adapters share: tensors, memory of devices, ranks."""
